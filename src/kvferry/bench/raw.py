"""NIXL alone, over the reader's memory and a producer's: what kvferry stands on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from kvferry.bench.engines import Engine
from kvferry.bench.reader import Reader
from kvferry.errors import TransferError
from kvferry.geometry import Region
from kvferry.planning.request import Indices
from kvferry.planning.strategy import Strategy
from kvferry.transport.agent import Agent, ReadState
from kvferry.transport.connected_peer import ConnectedPeer
from kvferry.transport.read_plan import ReadOrder
from kvferry.transport.settings import TransferSettings
from kvferry.transport.staging import StagingArea

LARGE_BYTES = 2 << 20
MOVE_SECONDS = 60.0
_POLL_SECONDS = 20e-6
_LOOK_SECONDS = 0.2


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
    """An agent of its own over the reader's memory, with an engine of the producer as its peer."""

    def __init__(self, reader: Reader, peer: int = 0) -> None:
        self._reader, self._number = reader, peer
        self._agent = Agent(f"bench-raw/{time.monotonic_ns():x}", progress=False)
        landing = np.zeros(1, np.uint64)
        self._landing = landing
        region = Region(int(landing.ctypes.data), landing.nbytes)
        ours, settings = reader.cache.geometry, TransferSettings(Strategy.DIRECT, staging_bytes=0)
        self._agent.register([*ours.regions, region])
        self._context: zmq.Context[Any] = zmq.Context()
        area = StagingArea(0, ours.regions[0])
        cards = reader.cards[peer]
        self._peer = ConnectedPeer(self._agent, ours, cards, region, area, self._context, settings)
        self._extra: list[Any] = []

    def same(self, source: Engine) -> Lists:
        """The descriptors that kvferry reads for the request, from the one rank that holds it."""
        ours = self._reader.engine
        lease = self._reader.granted("same descriptors", self._number)
        plan = self._peer.plan(ReadOrder("", "", source.span, source.tables, ours.tables, lease))
        self._reader.acknowledge("same descriptors", self._number)
        (rank,) = plan.ranks
        lists = rank.source.lists
        assert rank.direct is not None  # noqa: S101 - the strategy is pinned
        return Lists(lists.local, lists.remote, rank.direct, plan.tally.bytes)

    def large(self, size: int, length: int = LARGE_BYTES) -> Lists:
        """Descriptors of one length over the same memory, about `size` bytes in all, shuffled on both sides.

        Args:
            size: bytes in all, at most those of the cache.
            length: bytes of a descriptor, at most `size`.
        """
        ours = self._reader.cache.geometry.regions[0]
        theirs = self._reader.cards[self._number][0].geometry.regions[0]
        room = min(ours.length, theirs.length)
        length = min(length, size, room)
        count, places = min(size, room) // length, room // length
        local, remote = (
            self._agent.prepare(owner, region, np.array([[region.address, length, length, places]], np.int64))
            for owner, region in ((None, ours), (self._peer.sources[0].agent, theirs))
        )
        self._extra += [local, remote]
        shuffle = np.random.default_rng(3).permutation
        indices = Indices(*(shuffle(places)[:count].astype(np.int32) for _ in range(2)))
        return Lists(local, remote, indices, count * length)

    def read(self, lists: Lists) -> float:
        """Read once; seconds from making the transfer to its end."""
        agent, indices = self._agent, lists.indices
        give_up = Patience(self._reader.producer.check)
        started = time.perf_counter()
        handle = agent.read(lists.local, indices.dst, lists.remote, indices.src)
        state = agent.post(handle)
        while state is ReadState.IN_FLIGHT:
            give_up.look()
            # Looking without a pause would hold up NIXL's own thread, which has the work to do.
            time.sleep(_POLL_SECONDS)
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

    def close(self) -> None:
        """Give everything back."""
        for handle in self._extra:
            self._agent.release_list(handle)
        self._peer.close()
        self._context.destroy(linger=0)
        self._agent.close()


class Patience:
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
