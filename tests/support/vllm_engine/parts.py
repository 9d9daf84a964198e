"""kvferry's parts inside an engine's process. Tests that look into an engine find them here, and only here.

Functions take the engine first. Where an engine has several connectors, `of` is the number of kvferry's own.
"""

from __future__ import annotations

from typing import Any


def scheduler(engine: Any) -> Any:
    """vLLM's scheduler."""
    return engine.llm_engine.engine_core.engine_core.scheduler


def ferries(connector: Any) -> list[Any]:
    """kvferry's own among a connector's children, or it itself."""
    from kvferry.engines.vllm.connector import KVFerryConnector

    return [
        one for one in getattr(connector, "_connectors", [connector]) if isinstance(one, KVFerryConnector)
    ]


def half(engine: Any, of: int = 0) -> Any:
    """The scheduler's half of a connector."""
    return ferries(scheduler(engine).connector)[of].half


def worker_half(engine: Any, of: int = 0) -> Any:
    """The rank's half; None if the rank is another process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    ours = ferries(get_kv_transfer_group()) if has_kv_transfer_group() else []
    engine_id = engine.llm_engine.vllm_config.kv_transfer_config.engine_id if ours else None
    return half_of(ours[of]._workers[engine_id]) if ours else None


def half_of(worker: Any) -> Any:
    """The half of a worker, with what the engine's package knows beside it: caches and their layout."""
    half = worker.half
    half.caches, half.layout, half.geometry = worker._caches, worker.layout, half._info.geometry
    half.needed = half._needed
    return half


def only_half() -> Any:
    """The half of this worker process, which has one connector and one engine."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return half_of(only_worker(get_kv_transfer_group()))


def only_worker(connector: Any) -> Any:
    """The worker of a connector in a process of one engine."""
    (worker,) = connector._workers.values()
    return worker


def producer(engine: Any) -> Any:
    """What offers prompts to peers; None without transfer."""
    peering = half(engine)._peering
    return peering and peering.producer


def tickets(engine: Any) -> Any:
    """The book of tickets that peers redeem; None without transfer."""
    offering = producer(engine)
    return offering and offering._tickets


def lease_book(engine: Any) -> Any:
    """The book of leases."""
    return producer(engine)._book


def client(engine: Any) -> Any:
    """The end of the control channel that asks peers."""
    return half(engine)._peering.client


def server(engine: Any) -> Any:
    """The end of the control channel that answers peers; None without transfer."""
    peering = half(engine)._peering
    return peering and peering.server


def turn_finder(engine: Any) -> Any:
    """What asks peers for earlier turns."""
    return half(engine)._peering.source._turns


def lanes(engine: Any) -> list[Any]:
    """The threads that read from peers."""
    return worker_half(engine)._transfers._lanes


def gatherer(engine: Any) -> Any:
    """What packs blocks for peers."""
    return worker_half(engine)._transfers._exposed._gatherer


def mover(engine: Any) -> Any:
    """What copies between blocks and host memory."""
    return worker_half(engine)._mover


def tiering(engine: Any, of: int = 0) -> Any:
    """The tiers and what stores in them."""
    return half(engine, of)._tiering


def cache(engine: Any, of: int = 0) -> Any:
    """Host memory and the queues of slow tiers."""
    return tiering(engine, of)._cache


def queues(engine: Any, of: int = 0) -> list[Any]:
    """The queues of slow tiers; each has a `tier`."""
    return cache(engine, of).slow_tiers


def queue_of(engine: Any, name: str) -> Any:
    """The queue of the slow tier of this name."""
    return next(queue for queue in queues(engine) if queue.name == name)


def call_of(queue: Any, name: str) -> tuple[Any, str]:
    """The object and the attribute through which a call of a queue's tier goes."""
    operations = {"get": queue.reads, "put": queue.writes}.get(name)
    return (queue.tier, name) if operations is None else (operations, "_call")


def stores(engine: Any, of: int = 0) -> Any:
    """Stores that are under way."""
    return tiering(engine, of)._stores


def prompts(engine: Any) -> Any:
    """What names the chunks of prompts."""
    return tiering(engine)._prompts
