"""Movers: kvferry, raw NIXL and memcpy, each of which moves the same bytes and measures the time.

Every mover prepares everything that does not depend on block ids before its time starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from kvferry.errors import TransferError
from kvferry.measuring.raw_reads import PreparedLists, RawReads, WaitLimit
from kvferry.measuring.reader import Reader
from kvferry.measuring.simulated import SimulatedEngine
from kvferry.planning.strategy import Strategy
from kvferry.transport.lane import ReadResult
from kvferry.transport.read_plan import ReadPlan

_HOOK_POLL_SECONDS = 1e-3


class Mover(Protocol):
    """A method to move bytes.

    Attributes:
        name: name in reports.
        bytes: useful bytes per move.
    """

    name: str
    bytes: int

    def move(self) -> float:
        """Move once; return the seconds."""


class PoolMover:
    """A mover that makes one call per item, as many at a time as a pool has threads."""

    def __init__(
        self,
        name: str,
        size: int,
        pool: ThreadPoolExecutor,
        call: Callable[[Any], object],
        items: Sequence[Any],
    ) -> None:
        """Prepare a mover of `size` bytes in all."""
        self.name, self.bytes = name, size
        self._pool, self._call, self._items = pool, call, items

    def move(self) -> float:
        """Make all calls; return the seconds until the last has ended."""
        started = time.perf_counter()
        for _ in self._pool.map(self._call, self._items):
            pass
        return time.perf_counter() - started


class KVFerryMover:
    """A transfer by kvferry, from the moment the blocks are known until they may be used.

    Attributes:
        strategies: strategy of each group in the last move.
        stages: one tuple per move: seconds of planning, reading, the lease check and the rest. The rest is
            the hand-over between threads, the wait for the next hook, and the release.
        plan: read plan of the last move.
    """

    def __init__(
        self,
        name: str,
        reader: Reader,
        source: SimulatedEngine,
        *,
        peer: int = 0,
        strategy: Strategy | None = None,
        poll_seconds: float = _HOOK_POLL_SECONDS,
    ) -> None:
        """Prepare a mover.

        Args:
            name: name in reports.
            reader: the side that reads.
            source: engine to read from.
            peer: number of that engine in the producer process.
            strategy: strategy to use, or None for the cheapest.
            poll_seconds: time between two hooks.
        """
        self.name, self.bytes = name, reader.bytes
        self.strategies: tuple[str, ...] = ()
        self.plan: ReadPlan | None = None
        self.stages: list[tuple[float, float, float, float]] = []
        self._reader, self._source, self._peer = reader, source, peer
        self._strategy, self._poll_seconds = strategy, poll_seconds

    def move(self) -> float:
        """Move once, then check every byte and wait for the release; return the seconds that a request waits.

        Raises:
            TransferError: the load failed, or wrong bytes arrived.
        """
        reader = self._reader
        reader.clear()
        request = reader.load_request(
            self._source.span, self._source.tables, reader.engine.tables, self._peer, self._strategy
        )
        limit = WaitLimit(reader.producer.check)
        started = time.perf_counter()
        outcome = reader.steps.step([request])
        while request.key not in outcome.failures:
            limit.check()
            time.sleep(self._poll_seconds)
            outcome = reader.steps.step()
        reader.acknowledge(request.key, self._peer)
        seconds = time.perf_counter() - started
        if failure := outcome.failures[request.key]:
            raise TransferError(f"kvferry could not read from the producer process: {failure}")
        result = outcome.results[request.key]
        self.stages.append(_stages(result, seconds))
        self.plan = result.plan
        self.strategies = result.plan.strategy_by_group if result.plan else ()
        reader.check()
        reader.producer.wait_ended()
        return seconds


def _stages(result: ReadResult, seconds: float) -> tuple[float, float, float, float]:
    planning = result.plan.seconds if result.plan else 0.0
    known = planning, result.transfer_seconds, result.check_seconds
    return (*known, seconds - sum(known))


class RawNixlMover:
    """A READ by NIXL alone over prepared lists: make the transfer, post it, poll until it is done."""

    def __init__(self, name: str, reads: RawReads, lists: PreparedLists) -> None:
        self.name, self.bytes = name, lists.bytes
        self._reads, self._lists = reads, lists

    def move(self) -> float:
        """Move once; return the seconds.

        Raises:
            TransferError: NIXL failed.
        """
        return self._reads.read(self._lists)


class MemcpyMover:
    """A copy of as many bytes by one thread, from other memory of this process to the pool."""

    name = "(c) memcpy"

    def __init__(self, reader: Reader) -> None:
        self.bytes = reader.bytes
        self._dst, self._src = (memory[: self.bytes].numpy() for memory in reader.buffers)

    def move(self) -> float:
        """Copy once; return the seconds."""
        started = time.perf_counter()
        np.copyto(self._dst, self._src)
        return time.perf_counter() - started
