"""Run a real vLLM engine with tiers in this process, one step at a time."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from benchmarks.without_amx import turn_amx_off
from kvferry.common.errors import TransferError
from kvferry.connector.engine import PlainRequest

if TYPE_CHECKING:
    from kvferry.cache.chunk_cache import ChunkCache
    from kvferry.connector.tiers.tiering import Tiering

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_IDLE_SECONDS = 1e-3


class Rest:
    """The rest of 1 ms that a served engine's own loop takes after a step that computes nothing.

    Create it before the engine, in whose process its threads can then load. kvferry ends the rest when there
    is news, as it does in a served engine (`compat.process.find_waker`).
    """

    def __init__(self) -> None:
        from kvferry.engines.vllm import scheduler  # noqa: PLC0415 - imports vLLM

        self._news = Event()
        vars(scheduler)["find_waker"] = lambda: self._news.set

    def take(self) -> None:
        self._news.wait(_IDLE_SECONDS)
        self._news.clear()


def prepare_process(**environment: str) -> None:
    """Prepare this process for a vLLM engine on a CPU, without AMX. Call this before vLLM is imported.

    Args:
        environment: environment variables to set, in addition to those that every engine needs.
    """
    os.environ.update(_ENVIRONMENT, **environment)
    turn_amx_off()


_PATIENCE_SECONDS = 600.0


def tiered(tiers: Sequence[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """Return a transfer configuration for vLLM with kvferry's connector.

    Args:
        tiers: value of the connector's key ``tiers``.
        settings: other keys of the connector.
    """
    return {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.engines.vllm.connector",
        "kv_connector_extra_config": {"tiers": list(tiers), **settings},
    }


def side_by_side(connectors: Sequence[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """Return a transfer configuration for vLLM with several connectors in a `FerryMultiConnector`.

    Args:
        connectors: configuration of each connector.
        settings: other keys of the `FerryMultiConnector`, such as ``source_policy``.
    """
    return {
        "kv_connector": "FerryMultiConnector",
        "kv_connector_module_path": "kvferry.engines.vllm.multi.connector",
        "kv_connector_extra_config": {"connectors": list(connectors), **settings},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAnswer:
    """The first token of a request.

    Attributes:
        seconds: time to the first token.
        hit_tokens: number of the prompt's tokens that the engine did not compute.
        token: token id.
        logprobs: log probabilities of the most likely tokens, by token id; empty if not asked for.
    """

    seconds: float
    hit_tokens: int
    token: int
    logprobs: dict[int, float]


class SteppedEngine:
    """A vLLM engine on this machine's CPU that runs a step when `step` is called.

    Attributes:
        connectors: connector instances of the scheduler and of the worker; empty without a connector.
        halves: scheduler-side objects of kvferry's connectors: none, one or several.
    """

    def __init__(
        self,
        model: Path,
        longest: int,
        requests: int,
        cache_bytes: int,
        connector: Mapping[str, Any] | None,
        step_tokens: int = 2048,
    ) -> None:
        """Start the engine, which takes tens of seconds.

        Args:
            model: folder of the checkpoint.
            longest: length of the longest request, in tokens.
            requests: maximum number of requests at a time.
            cache_bytes: size of the KV cache, in bytes.
            connector: transfer configuration, as returned by `tiered` or `side_by_side`, or one for another
                connector; None for none.
            step_tokens: maximum number of tokens that a step computes.
        """
        threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        prepare_process(OMP_NUM_THREADS=threads)
        from vllm import LLM  # noqa: PLC0415 - slow, and reads the environment set above
        from vllm.config import KVTransferConfig  # noqa: PLC0415
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        transfer = (
            KVTransferConfig(kv_role="kv_both", kv_load_failure_policy="recompute", **connector)
            if connector
            else None
        )
        self._rest = Rest()
        self._engine = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=longest,
            kv_cache_memory_bytes=cache_bytes,
            max_num_seqs=requests,
            max_num_batched_tokens=step_tokens,
            enforce_eager=True,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            kv_transfer_config=transfer,
        )
        self._numbers = count()
        self._scheduler = self._engine.llm_engine.engine_core.engine_core.scheduler
        first: Any = self._scheduler.connector
        self.connectors = (first, get_kv_transfer_group()) if connector else ()
        several = getattr(first, "sub_connectors", [first])
        self.halves = tuple(one.half for one in several if hasattr(one, "half"))

    def add(self, prompt: Sequence[int], tokens: int, logprobs: int | None = None) -> None:
        """Add a request that generates `tokens` tokens.

        Args:
            prompt: token ids of the prompt.
            tokens: number of tokens to generate.
            logprobs: number of most likely tokens whose log probabilities to return; None for none.
        """
        from vllm import SamplingParams  # noqa: PLC0415

        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        name = str(next(self._numbers))
        self._engine.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)

    def step(self) -> tuple[int, int]:
        """Run one step. Return the number of requests that got a token, and the number that ended."""
        outputs = self._outputs()
        return len(outputs), sum(bool(output.finished) for output in outputs)

    def first_token(self, prompt: Sequence[int], tokens: int = 1) -> float:
        """Add a request, and run steps until its first token. Return the time to first token in seconds.

        Args:
            prompt: token ids of the prompt.
            tokens: number of tokens that the request generates.

        Raises:
            TransferError: there is no token after several minutes.
        """
        return self.first_answer(prompt, tokens).seconds

    def first_answer(
        self, prompt: Sequence[int], tokens: int = 1, logprobs: int | None = None
    ) -> FirstAnswer:
        """Add a request to an idle engine, run steps until its first token, and return that.

        Args:
            prompt: token ids of the prompt.
            tokens: number of tokens that the request generates.
            logprobs: number of most likely tokens whose log probabilities to return; None for none.

        Raises:
            TransferError: there is no token after several minutes.
        """
        started = time.perf_counter()
        self.add(prompt, tokens, logprobs)
        while not (outputs := self._outputs()):
            if time.perf_counter() - started > _PATIENCE_SECONDS:
                raise TransferError(f"an engine gave no token within {_PATIENCE_SECONDS:g} s")
        seconds = time.perf_counter() - started
        answer = outputs[0].outputs[0]
        likely = answer.logprobs[0].items() if answer.logprobs else ()
        return FirstAnswer(
            seconds=seconds,
            hit_tokens=outputs[0].num_cached_tokens or 0,
            token=answer.token_ids[0],
            logprobs={token: each.logprob for token, each in likely},
        )

    def settle(self) -> None:
        """Run steps until all requests have ended and all chunks are stored.

        Raises:
            TransferError: the engine is still busy after several minutes.
        """
        ends = time.monotonic() + _PATIENCE_SECONDS
        while self._busy:
            if time.monotonic() > ends:
                raise TransferError(f"tiers were still busy after {_PATIENCE_SECONDS:g} s")
            for cache in self._caches:
                cache.poll()
            self.step()

    def forget(self, *, host: bool) -> None:
        """Clear the engine's prefix cache and, if `host` is true, host memory. The storage tiers are kept."""
        self._engine.reset_prefix_cache()
        if host:
            for tiering in self._tierings:
                tiering.drop_host_memory()

    def prefetch(self, prompt: Sequence[int]) -> float:
        """Bring a prompt to host memory, and run steps until it is there. Return the time in seconds."""
        started = time.perf_counter()
        for tiering in self._tierings:
            tiering.prefetch(PlainRequest(request_id="prefetch", prompt_token_ids=prompt))
        self.settle()
        return time.perf_counter() - started

    def refresh(self) -> None:
        """Refresh the storage tiers, as their threads do every two seconds."""
        for cache in self._caches:
            for slow in cache.slow_tiers:
                slow.tier.refresh()

    def hits(self) -> Counter[str]:
        """Return the number of chunks that loads have fetched so far, by tier."""
        return sum((cache.counts.fetched for cache in self._caches), Counter[str]())

    def zero_blocks(self) -> None:
        """Fill the KV cache of an idle engine with zeros, so that no block has a prompt's earlier KV."""
        self._engine.collective_rpc(_zero_blocks)

    def _outputs(self) -> list[Any]:
        """Run one step, and return the outputs of the requests that got a token."""
        outputs: list[Any] = self._engine.llm_engine.step()
        if not outputs and not self._scheduler.running:
            self._rest.take()
        return outputs

    @property
    def _busy(self) -> bool:
        return (
            self._engine.llm_engine.has_unfinished_requests()
            or any(half.busy for half in self.halves)
            or any(len(writing) for cache in self._caches for writing in cache.slow_tiers)
        )

    @property
    def _tierings(self) -> list[Tiering]:
        return [half._tiering for half in self.halves]  # noqa: SLF001 - engines do not need it

    @property
    def _caches(self) -> list[ChunkCache]:
        return [tiering._cache for tiering in self._tierings]  # noqa: SLF001

    def close(self) -> None:
        """Stop the engine."""
        self._engine.llm_engine.engine_core.shutdown()


def _zero_blocks(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.zero_()
