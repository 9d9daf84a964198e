"""An engine with kvferry's connector in a process of its own, for a conversation through two engines."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kvferry.connector.events import Event, LoadBegan, LoadEnded
from kvferry.connector.load_results import LoadOutcome
from kvferry.errors import TransferError

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
_CONNECTOR = {
    "kv_connector": "KVFerryConnector",
    "kv_connector_module_path": "kvferry.engines.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
_STEPS_AFTER = 20
_START_SECONDS = 180.0
_ANSWER_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The configuration of an engine.

    Attributes:
        model: folder of the checkpoint.
        options: arguments of `vllm.LLM`.
        shares: True if the engine shares attention blocks whose recurrent state a load brings; False for
            vLLM's own rule, by which it shares only what all KV cache groups have.
    """

    model: Path
    options: dict[str, Any]
    shares: bool


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The answer of an engine, and what it loaded for it.

    Attributes:
        tokens: token ids of the answer.
        params: ``kv_transfer_params`` of the answer, for the next engine.
        begin, end: range of the loaded tokens; both 0 if nothing was loaded.
        bytes_by_group: number of bytes that were read, by label of the KV cache group.
    """

    tokens: tuple[int, ...]
    params: dict[str, Any] | None
    begin: int = 0
    end: int = 0
    bytes_by_group: dict[str, int] = field(default_factory=dict)


class EngineProcess:
    """A handle to an engine in another process. Leaving the context manager ends the process."""

    def __init__(self, setup: EngineSetup) -> None:
        """Start the process, and return before the engine is ready."""
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context)
        self._ready = self._pool.submit(_start, setup)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenProcessPool):
            self._pool.submit(_stop)
        self._pool.shutdown()

    def wait(self) -> int:
        """Wait until the engine is ready; return the number of tokens in one of its blocks.

        Raises:
            TransferError: the engine does not start.
        """
        return int(_result(self._ready, _START_SECONDS))

    def ask(self, prompt: Sequence[int], tokens: int, params: dict[str, Any] | None = None) -> TurnAnswer:
        """Send a prompt, and return the engine's answer.

        Args:
            prompt: token ids.
            tokens: length of the answer in tokens.
            params: ``kv_transfer_params`` of the request; None for none.

        Raises:
            TransferError: the engine does not answer.
        """
        found: TurnAnswer = _result(self._pool.submit(_ask, list(prompt), tokens, params), _ANSWER_SECONDS)
        return found


def _result(future: Future[Any], seconds: float) -> Any:
    try:
        return future.result(seconds)
    except TimeoutError as error:
        raise TransferError(f"an engine gave no answer within {seconds:g} s") from error
    except BrokenProcessPool as error:
        raise TransferError("an engine's process died; what it said last stands above") from error


_engine: Any = None
_loads: list[Event] = []


def _start(setup: EngineSetup) -> int:
    """Start the engine in this process, and return the number of tokens in one of its blocks."""
    global _engine  # noqa: PLW0603 - a process has one engine
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.environ.update(_ENVIRONMENT)
    from vllm import LLM  # noqa: PLC0415 - slow, and reads the environment set above
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    from kvferry.engines.vllm.connector import KVFerryConnector  # noqa: PLC0415

    if not setup.shares:
        KVFerryConnector.supports_divergent_local_hybrid_hits = property(lambda _: False)  # type: ignore[method-assign, assignment]
    _engine = LLM(
        model=str(setup.model),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=4,
        enforce_eager=True,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        kv_transfer_config=KVTransferConfig(**_CONNECTOR),
        **setup.options,
    )
    scheduler = _engine.llm_engine.engine_core.engine_core.scheduler
    scheduler.connector.scheduler.half.events.subscribe(_loads.append)
    return int(scheduler.block_size)


def _ask(prompt: list[int], tokens: int, params: dict[str, Any] | None) -> TurnAnswer:
    from vllm import SamplingParams  # noqa: PLC0415

    extra = {"kv_transfer_params": params} if params else None
    sampling = SamplingParams(
        max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra
    )
    _loads.clear()
    (output,) = _engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    for _ in range(_STEPS_AFTER):  # so that leases are released
        _engine.llm_engine.step()
    said = tuple(output.outputs[0].token_ids)
    began = [event for event in _loads if isinstance(event, LoadBegan)]
    ended = [event for event in _loads if isinstance(event, LoadEnded)]
    if not began:
        return TurnAnswer(said, output.kv_transfer_params)
    if len(began) > 1 or ended[0].outcome is not LoadOutcome.READY:
        raise TransferError(f"a load has failed: {ended[0].failure}")
    moved = {each.group: each.size for each in ended[0].moved}
    return TurnAnswer(said, output.kv_transfer_params, began[0].begin, began[0].end, moved)


def _stop() -> None:
    if _engine is not None:
        _engine.llm_engine.engine_core.shutdown()
