"""The halves of kvferry's connectors in an engine's own process."""

from __future__ import annotations

from typing import Any


def half_of(worker: Any) -> Any:
    """The half of a worker, with what the engine's package knows beside it: caches and their layout."""
    half = worker.half
    half._caches, half.layout = worker._caches, worker.layout
    return half


def only_half() -> Any:
    """The half of this worker process, which has one connector and one engine."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    (worker,) = get_kv_transfer_group()._workers.values()
    return half_of(worker)
