"""The ways of moving the same bytes that are compared.

A mover moves once and says how long that took, in seconds. What may be prepared before block ids are known is
prepared before the clock runs, for every mover alike; what depends on them is on the clock.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from kvferry.bench.engines import Engine
from kvferry.bench.raw import Lists, Patience, RawReads
from kvferry.bench.reader import Reader
from kvferry.errors import TransferError
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
        source: Engine,
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
        reader.wipe()
        wanted = reader.wanted(
            self._source.span, self._source.tables, reader.engine.tables, self._peer, self._strategy
        )
        give_up = Patience(reader.producer.check)
        started = time.perf_counter()
        stepped = reader.steps.step([wanted])
        while wanted.key not in stepped.failures:
            give_up.look()
            time.sleep(self._poll_seconds)
            stepped = reader.steps.step()
        reader.acknowledge(wanted.key, self._peer)
        seconds = time.perf_counter() - started
        if failure := stepped.failures[wanted.key]:
            raise TransferError(f"kvferry could not read from the producer process: {failure}")
        result = stepped.results[wanted.key]
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

    def __init__(self, name: str, reads: RawReads, lists: Lists) -> None:
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
