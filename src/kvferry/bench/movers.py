"""The ways of moving the same bytes that are compared.

A mover moves once and says how long that took, in seconds. What may be prepared before block ids are known is
prepared before the clock runs, for every mover alike; what depends on them is on the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import zmq

from kvferry.bench.reader import Reader
from kvferry.errors import TransferError
from kvferry.geometry import Region
from kvferry.planning.pieces import Int64s
from kvferry.planning.request import Indices
from kvferry.planning.strategy import Strategy
from kvferry.transport.agent import Agent, ReadState
from kvferry.transport.area import Area
from kvferry.transport.peer import Peer, ReadOrder
from kvferry.transport.settings import TransferSettings
from kvferry.transport.thread import ReadResult

LARGE_BYTES = 2 << 20
MOVE_SECONDS = 60.0
_HOOK_POLL_SECONDS = 1e-3
_RAW_POLL_SECONDS = 20e-6
_LOOK_SECONDS = 0.2


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
        stages: per move, seconds of planning, of reading, of the lease check, and of all the rest: handing
            over between threads, the next look of a hook, the acknowledgement.
    """

    name = "kvferry"

    def __init__(self, reader: Reader, tokens: int, src_table: Int64s, dst_table: Int64s) -> None:
        self.bytes = len(src_table) * reader.pool.shape.block_bytes
        self.stages: list[tuple[float, float, float, float]] = []
        self._reader, self._tokens, self._src, self._dst = reader, tokens, src_table, dst_table

    def move(self) -> float:
        """Move once, check every page, see the acknowledgement arrive; what a request waits for is timed.

        Raises:
            TransferError: the load failed, or other bytes than those asked for arrived.
        """
        reader = self._reader
        reader.pool.wipe()
        wanted = reader.wanted(self._tokens, self._src, self._dst)
        give_up = _Patience(reader.producer.check)
        started = time.perf_counter()
        stepped = reader.steps.step([wanted])
        while wanted.key not in stepped.failures:
            give_up.look()
            time.sleep(_HOOK_POLL_SECONDS)
            stepped = reader.steps.step()
        reader.acknowledge(wanted.key)
        seconds = time.perf_counter() - started
        if failure := stepped.failures[wanted.key]:
            raise TransferError(f"kvferry could not read from the producer process: {failure}")
        self.stages.append(_stages(stepped.results[wanted.key], seconds))
        reader.pool.check(self._src, self._dst)
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

    def __init__(self, reader: Reader, size: int) -> None:
        self._dst = reader.pool.bytes[:size]
        self._src = np.full(size, 0xEE, np.uint8)
        self.bytes = size

    def move(self) -> float:
        """Move once."""
        started = time.perf_counter()
        np.copyto(self._dst, self._src)
        return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Lists:
    """Prepared lists of both sides and the positions to read.

    Attributes:
        local, remote: the transport's.
        indices: which descriptors.
        bytes: what they hold together.
    """

    local: Any
    remote: Any
    indices: Indices
    bytes: int


class RawReads:
    """An agent of its own over the reader's memory, with the producer's as its peer."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._agent = Agent(f"bench-raw/{time.monotonic_ns():x}")
        landing = np.zeros(1, np.uint64)
        self._landing = landing
        region = Region(int(landing.ctypes.data), landing.nbytes)
        self._agent.register([*reader.pool.geometry.regions, region])
        ours, settings = reader.pool.geometry, TransferSettings(Strategy.DIRECT, staging_bytes=0)
        self._context: zmq.Context[Any] = zmq.Context()
        area = Area(0, ours.regions[0])
        self._peer = Peer(self._agent, ours, reader.cards, region, area, self._context, settings)
        self._extra: list[Any] = []

    def same(self, tokens: int, src_table: Int64s, dst_table: Int64s) -> Lists:
        """The descriptors that kvferry reads for this request."""
        wanted = self._reader.wanted(tokens, src_table, dst_table)
        plan = self._peer.plan(
            ReadOrder(wanted.key, wanted.peer, wanted.span, (src_table,), (dst_table,), wanted.ticket)
        )
        self._reader.acknowledge(wanted.key)
        (rank,) = plan.ranks
        lists = rank.source.lists
        assert rank.direct is not None  # noqa: S101 - the strategy is pinned
        return Lists(lists.local, lists.remote, rank.direct, plan.tally.bytes)

    def large(self, size: int) -> Lists:
        """Descriptors of 2 MiB over the same memory, about `size` bytes in all, shuffled on both sides."""
        ours, theirs = self._reader.pool.geometry.regions[0], self._reader.cards[0].geometry.regions[0]
        length = min(LARGE_BYTES, size)
        count = size // length
        local, remote = (
            self._agent.prepare(owner, region, np.array([[region.address, length, length, count]], np.int64))
            for owner, region in ((None, ours), (self._peer.sources[0].agent, theirs))
        )
        self._extra += [local, remote]
        shuffle = np.random.default_rng(3).permutation
        indices = Indices(shuffle(count).astype(np.int32), shuffle(count).astype(np.int32))
        return Lists(local, remote, indices, count * length)

    def read(self, lists: Lists) -> float:
        """Read once; seconds from making the transfer to its end."""
        agent, indices = self._agent, lists.indices
        give_up = _Patience(self._reader.producer.check)
        started = time.perf_counter()
        handle = agent.read(lists.local, indices.dst, lists.remote, indices.src)
        state = agent.post(handle)
        while state is ReadState.IN_FLIGHT:
            give_up.look()
            # Looking without a pause would hold up NIXL's own thread, which has the work to do.
            time.sleep(_RAW_POLL_SECONDS)
            state = agent.state(handle)
        seconds = time.perf_counter() - started
        agent.release(handle)
        if state is ReadState.FAILED:
            self._reader.producer.check()
            raise TransferError("NIXL failed while reading from the producer process")
        return seconds

    def make_only(self, lists: Lists) -> float:
        """Seconds that NIXL takes to make a transfer of these, which is not posted."""
        started = time.perf_counter()
        handle = self._agent.read(lists.local, lists.indices.dst, lists.remote, lists.indices.src)
        seconds = time.perf_counter() - started
        self._agent.release(handle)
        return seconds

    def plan_only(self, order: ReadOrder) -> float:
        """Seconds that planning takes."""
        started = time.perf_counter()
        self._peer.plan(order)
        return time.perf_counter() - started

    def close(self) -> None:
        """Give everything back."""
        for handle in self._extra:
            self._agent.release_list(handle)
        self._peer.close()
        self._context.destroy(linger=0)
        self._agent.close()


class _Patience:
    """Ends a wait that has become pointless, without a system call on every look."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        now = time.monotonic()
        self._end, self._next = now + MOVE_SECONDS, now + _LOOK_SECONDS

    def look(self) -> None:
        """Raise TransferError if the other process has died, or time is up."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_SECONDS
        self._check()
        if now > self._end:
            raise TransferError(f"a transfer was not done after {MOVE_SECONDS:g} s")
