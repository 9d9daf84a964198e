"""The ways of moving the same bytes that are compared.

A mover moves once and says how long that took, in seconds. What may be prepared before block ids are known is
prepared before the clock runs, for every mover alike; what depends on them is on the clock.
"""

from __future__ import annotations

import time
from typing import Protocol

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
    """One way of moving.

    Attributes:
        name: for people.
        bytes: useful bytes of one move.
    """

    name: str
    bytes: int

    def move(self) -> float:
        """Move once; seconds."""


class Ferry:
    """kvferry: from blocks known to blocks usable, everything included.

    Attributes:
        strategies: that the last move used, of all groups.
        stages: per move, seconds of planning, of reading, of the lease check, and of all the rest: handing
            over between threads, the next look of a hook, the acknowledgement.
        plan: of the last move.
    """

    def __init__(
        self,
        name: str,
        reader: Reader,
        source: SimulatedEngine,
        peer: int = 0,
        strategy: Strategy | None = None,
        poll_seconds: float = _HOOK_POLL_SECONDS,
    ) -> None:
        """Prepare.

        Args:
            name: for people.
            reader: reads.
            source: what the peer is.
            peer: its number.
            strategy: pinned, None for the cheapest.
            poll_seconds: between looks of a hook.
        """
        self.name, self.bytes = name, reader.bytes
        self.strategies: tuple[str, ...] = ()
        self.plan: ReadPlan | None = None
        self.stages: list[tuple[float, float, float, float]] = []
        self._reader, self._source, self._peer = reader, source, peer
        self._strategy, self._poll_seconds = strategy, poll_seconds

    def move(self) -> float:
        """Move once, check every byte, see the acknowledgement arrive; what a request waits for is timed.

        Raises:
            TransferError: the load failed, or other bytes than those asked for arrived.
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


class RawNixl:
    """NIXL alone over lists prepared before: make the transfer, post it, poll until it is done."""

    def __init__(self, name: str, reads: RawReads, lists: PreparedLists) -> None:
        self.name, self.bytes = name, lists.bytes
        self._reads, self._lists = reads, lists

    def move(self) -> float:
        """Move once.

        Raises:
            TransferError: NIXL failed.
        """
        return self._reads.read(self._lists)


class Memcpy:
    """One thread copies as many bytes from memory of this process to the pool."""

    name = "(c) memcpy"

    def __init__(self, reader: Reader) -> None:
        self.bytes = reader.bytes
        self._dst, self._src = (memory[: self.bytes].numpy() for memory in reader.buffers)

    def move(self) -> float:
        """Move once."""
        started = time.perf_counter()
        np.copyto(self._dst, self._src)
        return time.perf_counter() - started
