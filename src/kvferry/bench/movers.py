"""Movers, which move the same bytes by different methods and measure the time: kvferry, raw NIXL, memcpy.

Preparation that does not depend on block ids is not part of the measured time.
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
from kvferry.transport.read_order import ReadResult
from kvferry.transport.read_plan import ReadPlan

_HOOK_POLL_SECONDS = 1e-3


class Mover(Protocol):
    """A method of moving bytes whose time a benchmark measures, such as kvferry, raw NIXL or memcpy.

    Attributes:
        name: name of the method in reports.
        bytes: number of bytes that each move delivers. Bytes that it reads in excess are not counted.
    """

    name: str
    bytes: int

    def move(self) -> float:
        """Move all bytes once, and return the time in seconds."""


class PoolMover:
    """A mover (benchmarked method of moving bytes) that calls a function once per item.

    The threads of a pool share the items.
    """

    def __init__(
        self,
        name: str,
        size: int,
        pool: ThreadPoolExecutor,
        call: Callable[[Any], object],
        items: Sequence[Any],
    ) -> None:
        """Set the function that moves the bytes, and the arguments with which each move calls it.

        Args:
            name: name of the mover in reports.
            size: number of bytes that all calls together move.
            pool: pool of threads that make the calls.
            call: function that takes one item and moves a part of the bytes.
            items: items with which `call` is called in each move, one per call.
        """
        self.name, self.bytes = name, size
        self._pool, self._call, self._items = pool, call, items

    def move(self) -> float:
        """Call the function for all items, and return the seconds until the last call has ended."""
        started = time.perf_counter()
        for _ in self._pool.map(self._call, self._items):
            pass
        return time.perf_counter() - started


class KVFerryMover:
    """A mover (benchmarked method of moving bytes) that loads a request's KV with kvferry.

    The measured time starts when the block ids are known. It ends when the request may use the blocks.

    Attributes:
        strategies: transfer strategy of each KV cache group in the last move; empty before the first move.
        stages: seconds of planning, of reading, of the lease check and of the rest, one tuple per move. The
            rest is the hand-over between threads, the wait for the next engine step, and the lease's release.
        plan: read plan of the last move; None before the first move.
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
        """Set the engine that reads and the engine to read from.

        Args:
            name: name of the mover in reports.
            reader: simulated engine rank that reads.
            source: engine to read from.
            peer: index of the source engine in the producer process.
            strategy: transfer strategy to use; None for the cheapest.
            poll_seconds: seconds between two engine steps. The end of a load is noticed only in a step.
        """
        self.name, self.bytes = name, reader.bytes
        self.strategies: tuple[str, ...] = ()
        self.plan: ReadPlan | None = None
        self.stages: list[tuple[float, float, float, float]] = []
        self._reader, self._source, self._peer = reader, source, peer
        self._strategy, self._poll_seconds = strategy, poll_seconds

    def move(self) -> float:
        """Load the request's KV once, check the bytes, and return the seconds until the request may use them.

        The time includes neither the check of the bytes nor the wait until the lease has ended.

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
    """A mover (benchmarked method of moving bytes) that uses NIXL without kvferry.

    Each move creates a READ from prepared descriptor lists, posts the READ, and polls until it has ended.
    """

    def __init__(self, name: str, reads: RawReads, lists: PreparedLists) -> None:
        """Set the NIXL agent and the descriptors to read.

        Args:
            name: name of the mover in reports.
            reads: NIXL agent that executes the READs.
            lists: prepared descriptor lists of both sides, and the indices of the descriptors to read.
        """
        self.name, self.bytes = name, lists.bytes
        self._reads, self._lists = reads, lists

    def move(self) -> float:
        """Read all descriptors once, and return the time in seconds.

        Raises:
            TransferError: NIXL failed.
        """
        return self._reads.read(self._lists)


class MemcpyMover:
    """A mover (benchmarked method of moving bytes) that copies host memory with one thread of this process.

    Each move copies as many bytes as a request's KV has (`Reader.bytes`) into the reader's KV cache.
    """

    name = "(c) memcpy"

    def __init__(self, reader: Reader) -> None:
        self.bytes = reader.bytes
        self._dst, self._src = (memory[: self.bytes].numpy() for memory in reader.buffers)

    def move(self) -> float:
        """Copy all bytes once, and return the time in seconds."""
        started = time.perf_counter()
        np.copyto(self._dst, self._src)
        return time.perf_counter() - started
