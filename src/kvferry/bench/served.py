"""A real vLLM engine in this process, stepped by hand, with tiers."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.errors import TransferError

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_IDLE_SECONDS = 1e-3
_PATIENCE_SECONDS = 600.0


class Served:
    """An engine on this machine's processors, whatever else it has.

    Attributes:
        connectors: kvferry's instances in the scheduler and in the worker.
    """

    def __init__(
        self,
        model: Path,
        longest: int,
        requests: int,
        cache_bytes: int,
        tiers: Sequence[dict[str, Any]],
    ) -> None:
        """Start it; tens of seconds.

        Args:
            model: a checkpoint of `checkpoint`.
            longest: tokens of a request, at most.
            requests: at a time, at most.
            cache_bytes: of its KV cache.
            tiers: as of the connector's configuration.
        """
        os.environ.update(_ENVIRONMENT)
        os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        from vllm import LLM  # noqa: PLC0415 - seconds, and only with the environment above
        from vllm.config import KVTransferConfig  # noqa: PLC0415
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        transfer = KVTransferConfig(
            kv_connector="KVFerryConnector",
            kv_connector_module_path="kvferry.engines.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"tiers": list(tiers)},
        )
        self._engine = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=longest,
            kv_cache_memory_bytes=cache_bytes,
            max_num_seqs=requests,
            max_num_batched_tokens=2048,
            enforce_eager=True,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            kv_transfer_config=transfer,
        )
        self._numbers = count()
        scheduler = self._engine.llm_engine.engine_core.engine_core.scheduler
        self._scheduler, self._half = scheduler, scheduler.connector.scheduler_half
        self.connectors = (scheduler.connector, get_kv_transfer_group())

    def add(self, prompt: Sequence[int], tokens: int) -> None:
        """A request for so many tokens."""
        from vllm import SamplingParams  # noqa: PLC0415

        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        name = str(next(self._numbers))
        self._engine.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)

    def step(self) -> tuple[int, int]:
        """One step of the engine: (requests that got a token, requests that ended)."""
        outputs = self._engine.llm_engine.step()
        if not outputs and not self._scheduler.running:
            # As an engine's own loop, which leaves the processor to those that load.
            time.sleep(_IDLE_SECONDS)
        return len(outputs), sum(bool(output.finished) for output in outputs)

    def first_token(self, prompt: Sequence[int]) -> float:
        """Seconds from a request's arrival to its first token, nothing else going on.

        Raises:
            TransferError: it did not come.
        """
        started = time.perf_counter()
        self.add(prompt, 1)
        while not self.step()[0]:
            if time.perf_counter() - started > _PATIENCE_SECONDS:
                raise TransferError(f"an engine gave no token within {_PATIENCE_SECONDS:g} s")
        return time.perf_counter() - started

    def settle(self) -> None:
        """Step until all chunks are where they belong.

        Raises:
            TransferError: that does not end.
        """
        ends = time.monotonic() + _PATIENCE_SECONDS
        while self._half.busy or any(map(len, self._cache.writing)):
            if time.monotonic() > ends:
                raise TransferError(f"tiers were still busy after {_PATIENCE_SECONDS:g} s")
            self._cache.poll()
            self.step()

    def forget(self, *, host: bool) -> None:
        """Forget the engine's own prefixes; host memory as well, but not what is behind it."""
        self._engine.reset_prefix_cache()
        if host:
            self._cache.clear()

    def hits(self) -> Counter[str]:
        """Chunks that loads have taken so far, by tier."""
        return Counter(self._cache.counts.fetched)

    @property
    def _cache(self) -> ChunkCache:
        cache: ChunkCache = self._half._tiering._cache  # noqa: SLF001 - no engine has a use for it
        return cache

    def close(self) -> None:
        """End it."""
        self._engine.llm_engine.engine_core.shutdown()
