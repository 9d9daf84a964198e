"""Movers, the methods of moving bytes that benchmarks compare: kvferry, raw NIXL, memcpy.

Preparation that does not depend on block ids is not part of the measured time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from kvferry.planning import Strategy
from kvferry.tools.measuring.raw_reads import PreparedLists, RawReads
from kvferry.tools.measuring.reader import STEP_SECONDS, Reader
from kvferry.tools.measuring.simulated import SimulatedEngine


class Mover(Protocol):
    """A method of moving bytes whose time a benchmark measures. `bytes` leaves out those read in excess."""

    name: str
    bytes: int

    def move(self) -> float:
        """Move all bytes once, and return the time in seconds."""


@dataclass(slots=True)
class CallMover:
    """A mover that calls a function."""

    name: str
    bytes: int
    move: Callable[[], float]


def pool_mover(
    name: str, size: int, pool: ThreadPoolExecutor, call: Callable[[Any], object], items: Sequence[Any]
) -> CallMover:
    """Return a mover that calls a function once per item. The threads of a pool share the items."""

    def move() -> float:
        started = time.perf_counter()
        for _ in pool.map(call, items):
            pass
        return time.perf_counter() - started

    return CallMover(name, size, move)


class KVFerryMover:
    """A mover that loads a request's KV with kvferry.

    The measured time starts when the block ids are known. It ends when the request may use the blocks.

    Attributes:
        strategies: transfer strategy of each KV cache group in the last move; empty before the first.
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
        poll_seconds: float = STEP_SECONDS,
    ) -> None:
        self.name, self.bytes = name, reader.bytes
        self.strategies: tuple[str, ...] = ()
        self.stages: list[tuple[float, float, float, float]] = []
        self._reader, self._source, self._peer = reader, source, peer
        self._strategy, self._poll_seconds = strategy, poll_seconds

    def move(self) -> float:
        """Load the request's KV, check the bytes, and return the seconds until the request may use them."""
        reader = self._reader
        # Else bytes of the move before would pass the check.
        reader.clear()
        result, seconds = reader.load(self._source, self._peer, self._strategy, self._poll_seconds)
        found = result.figures
        known = found.plan_seconds, found.transfer_seconds, found.check_seconds
        self.stages.append((*known, seconds - sum(known)))
        self.strategies = tuple(map("+".join, found.strategies_by_group))
        # The user waits neither for the check of the bytes, nor for the end of the lease.
        reader.check()
        reader.producer.wait_ended()
        return seconds


def raw_nixl(name: str, reads: RawReads, lists: PreparedLists) -> CallMover:
    """Return a mover that creates a READ from prepared descriptor lists, posts it, and polls for its end."""
    return CallMover(name, lists.bytes, partial(reads.read, lists))


def memcpy(reader: Reader) -> CallMover:
    """Return a mover that copies as many bytes as a request's KV has, in host memory with one thread."""
    dst, src = (memory[: reader.bytes].numpy() for memory in reader.buffers)

    def move() -> float:
        started = time.perf_counter()
        np.copyto(dst, src)
        return time.perf_counter() - started

    return CallMover("(c) memcpy", reader.bytes, move)
