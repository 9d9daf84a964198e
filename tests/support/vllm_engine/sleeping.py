"""A stand-in for the allocator of sleeping GPUs: on a CPU, where vLLM's workers ignore calls to sleep."""

from __future__ import annotations

from typing import Any

from support.unmapped import give_back, take_away

_DISCARDS_WEIGHTS = 2


def declare() -> None:
    """Let a sleeping CPU worker lose the memory of its KV cache, and get other memory at the same addresses.

    Whoever touches the memory meanwhile ends the process. At level 2 the weights are lost too.
    """
    import torch
    from vllm.v1.worker.cpu_worker import CPUWorker

    def sleep(self: Any, level: int = 1) -> None:
        for address, length in _storages(self).items():
            take_away(address, length)
        if level >= _DISCARDS_WEIGHTS:
            with torch.no_grad():
                for weight in self.get_model().parameters():
                    weight.zero_()

    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            for address, length in _storages(self).items():
                give_back(address, length)

    CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up


def pause(engine: Any) -> None:
    """Let the engine take no new requests, as ``/pause`` does."""
    from vllm.v1.core.sched.interface import PauseState

    engine.llm_engine.engine_core.engine_core.scheduler.set_pause_state(PauseState.PAUSED_NEW)


def fall_asleep(engine: Any, level: int = 1) -> None:
    """Let the engine sleep. In its client's process it does not wait for what keeps blocks: see `pause`."""
    engine.sleep(level=level)


def wake_up(engine: Any, tags: list[str] | None = None) -> None:
    """Wake the engine up, or a part of it."""
    engine.wake_up(tags)


def _storages(worker: Any) -> dict[int, int]:
    """Lengths in bytes of all memory of the worker's KV cache, by address."""
    found = {}
    for caches in worker.model_runner.kv_caches:
        for cache in caches if isinstance(caches, list | tuple) else [caches]:
            storage = cache.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found
