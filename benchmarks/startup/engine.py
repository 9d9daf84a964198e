"""Start a vLLM engine with or without a connector in this process, and measure the start."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.served import prepare_process
from benchmarks.startup.variants import connector_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSetup:
    """The configuration of an engine.

    Attributes:
        model: folder of the checkpoint.
        variant: name of the connector, one of `VARIANTS`.
        port: port of NixlConnector's side channel.
        longest: length of the longest request, in tokens.
        cache_bytes: size of the KV cache, in bytes.
        files: existing folder for a file tier.
        engine: further keyword arguments of `vllm.LLM`.
    """

    model: Path
    variant: str
    port: int
    longest: int
    cache_bytes: int
    files: Path
    engine: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyEngine:
    """The start of an engine.

    Attributes:
        import_seconds: time to import the connector's modules, after vLLM has been imported.
        engine_seconds: time from then until the engine is ready.
        cpu_seconds: processor time of all threads in both together.
        rss_bytes: resident memory of the process and its children when the engine is ready.
        pss_bytes: the same, but memory that several processes share counts in proportion.
        children: number of child processes.
    """

    import_seconds: float
    engine_seconds: float
    cpu_seconds: float
    rss_bytes: int
    pss_bytes: int
    children: int


class StartedEngine:
    """A vLLM engine on this machine's CPU that knows how it started."""

    def __init__(self, setup: StartSetup) -> None:
        """Start the engine, and measure the start."""
        threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        prepare_process(
            OMP_NUM_THREADS=threads,
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(setup.port),
        )
        from vllm import LLM  # noqa: PLC0415 - slow, and reads the environment set above
        from vllm.config import KVTransferConfig  # noqa: PLC0415

        connector = connector_of(setup.variant, setup.files)
        began, cpu = time.perf_counter(), time.process_time()
        for module in connector.modules:
            import_module(module)
        imported = time.perf_counter()
        self._engine = LLM(
            model=str(setup.model),
            skip_tokenizer_init=True,
            max_model_len=setup.longest,
            kv_cache_memory_bytes=setup.cache_bytes,
            max_num_seqs=32,
            max_num_batched_tokens=2048,
            enforce_eager=True,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            kv_transfer_config=KVTransferConfig(kv_role="kv_both", **connector.config)
            if connector.config
            else None,
            **setup.engine,
        )
        ready, cpu = time.perf_counter(), time.process_time() - cpu
        self._start = _start(imported - began, ready - imported, cpu)

    def start(self) -> ReadyEngine:
        """Return the measured start."""
        return self._start

    def close(self) -> None:
        """Stop the engine."""
        self._engine.llm_engine.engine_core.shutdown()


def _start(import_seconds: float, engine_seconds: float, cpu_seconds: float) -> ReadyEngine:
    import psutil  # noqa: PLC0415 - only the engine's process needs it

    this = psutil.Process()
    children = this.children(recursive=True)
    memory = [process.memory_full_info() for process in (this, *children)]
    return ReadyEngine(
        import_seconds=import_seconds,
        engine_seconds=engine_seconds,
        cpu_seconds=cpu_seconds,
        rss_bytes=sum(each.rss for each in memory),
        pss_bytes=sum(each.pss for each in memory),
        children=len(children),
    )
