"""The host tier: chunks in an arena, within its capacity, the least useful leave first.

Scheduler side only: it touches no chunk. What it answers is for the ranks, who move the bytes and report
back.

    store   reserve ─▶ Ticket ─▶ every rank: commit or abort      (cancel: not wanted any more)
    load    open ─▶ Opened ─▶ every rank: close

A chunk of a ticket stays where it is until every rank has reported, so ranks must report on every ticket, and
only when nothing of theirs is in flight. Nothing here waits, and nothing that can be foreseen raises: a store
that finds no room is dropped, a report that nobody waits for is counted.

A prompt's later chunks are of no use without the earlier ones, and policies keep longest what was used last:
so let ranks report on, and close, the chunks of a prompt from its end to its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.tiers.book import ArenaBook, Chunk, State, Ticket
from kvferry.tiers.counters import Drop, HostCounters, Miss
from kvferry.tiers.eviction import Policy

_REMEMBERED = 1 << 16
"""So many evicted keys are told from such as were never here."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A chunk that may be read until it is closed.

    Attributes:
        ticket: where it is, and what to close.
        digests: of all units, one after another; what does not match them must not be used.
    """

    ticket: Ticket
    digests: bytes


class HostTier:
    """Not thread-safe: one thread (the engine's) calls it.

    Attributes:
        counters: what it has done.
        capacity_bytes, used_bytes: of slots; the first is never exceeded.
    """

    def __init__(self, book: ArenaBook, policy: Callable[[int], Policy]) -> None:
        """Empty.

        Args:
            book: of the arena, without chunks; from here on nobody else's.
            policy: makes one for a capacity in bytes (`kvferry.tiers.eviction.POLICIES`).
        """
        self.counters = HostCounters()
        self.capacity_bytes = book.slabs.capacity_bytes
        self._book = book
        self._policy = policy(self.capacity_bytes)
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        kinds = len({shape.stride for shape in book.shapes})
        self._most_evicted = (kinds + 1) * book.slabs.slab_bytes

    def __len__(self) -> int:
        """Chunks that can be read."""
        return len(self._book.ready)

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that are not free."""
        return self._book.slabs.used_bytes

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which of these could be opened now: bool of shape (len(keys),). Changes and counts nothing."""
        return np.fromiter(map(self._book.ready.__contains__, keys), np.bool_, len(keys))

    def reserve(self, key: bytes, group: int) -> Ticket | None:
        """Make room for a chunk, where need be by evicting others; None: dropped, and counted."""
        if key in self._book.ready or key in self._book.filling:
            self._drop(Drop.PRESENT)
            return None
        self._make_room(group)
        ticket = self._book.reserve(key, group)
        if ticket is None:
            self._drop(Drop.NO_ROOM)
        return ticket

    def commit(self, ticket: Ticket, rank: int, runs: Sequence[tuple[int, bytes]]) -> None:
        """A rank has written its units; with the last rank the chunk can be read.

        Args:
            ticket: of the store.
            rank: who reports.
            runs: first unit, and digests of it and the units after it; none of a rank that had none.
        """
        if not self._book.owes(ticket, rank):
            return self._trespassed(ticket)
        chunk = self._book.chunk(ticket)
        was = chunk.state
        if self._book.wrote(ticket, rank, runs) is not None:
            self._policy.admit(chunk.key, self._book.stride(chunk.group))
            self._evicted.pop(chunk.key, None)
            self.counters.stored += 1
            self.counters.stored_bytes += self._content(chunk)
        elif was is not chunk.state:
            self._drop(Drop.FAILED)
        return None

    def abort(self, ticket: Ticket, rank: int) -> None:
        """A rank has not written its units, and has nothing in flight: the chunk is dropped."""
        if not self._book.owes(ticket, rank):
            return self._trespassed(ticket)
        if self._book.chunk(ticket).state is State.FILLING:
            self._drop(Drop.FAILED)
        return self._book.failed(ticket, rank)

    def cancel(self, ticket: Ticket) -> None:
        """A store is not wanted any more; its ranks still report. Nothing if it is over."""
        before = len(self._book.filling)
        self._book.cancel(ticket)
        if len(self._book.filling) < before:
            self._drop(Drop.CANCELLED)

    def open(self, key: bytes) -> Opened | None:
        """Hold a chunk for reading by all ranks; None if it is not here, which is counted."""
        chunk = self._book.ready.get(key)
        if chunk is None:
            self.counters.misses[self._why_missed(key)] += 1
            return None
        self._policy.touch(key)
        if not chunk.holds:
            self._policy.pin(key)
        self.counters.hits += 1
        self.counters.hit_bytes += self._content(chunk)
        return Opened(self._book.read(key), bytes(chunk.digests))

    def close(self, ticket: Ticket, rank: int, *, intact: bool) -> None:
        """A rank reads no more.

        Args:
            ticket: of `Opened`.
            rank: who reports.
            intact: all it read had the digests that it should; if not, nobody opens this chunk again.
        """
        if not self._book.owes(ticket, rank):
            self.counters.late += 1
            return
        chunk = self._book.chunk(ticket)
        if not intact:
            self._distrust(chunk)
        self._book.done(ticket, rank)
        if chunk.state is State.READY and not chunk.holds:
            self._policy.unpin(chunk.key)

    def lost(self, rank: int) -> None:
        """A rank's process has ended and can touch nothing any more: settle what it owes.

        Its stores have failed, its loads are closed. Another process may take its number.
        """
        for ticket, storing in self._book.owed_by(rank):
            if storing:
                self.abort(ticket, rank)
            else:
                self.close(ticket, rank, intact=True)

    def clear(self) -> None:
        """Forget all chunks, and those being stored: what the keys named has changed."""
        for key in list(self._book.ready):
            self._policy.remove(key)
            self._book.evict(key)
        for chunk in list(self._book.filling.values()):
            self._book.spoil(chunk)
            self._drop(Drop.CANCELLED)

    def check_integrity(self) -> None:
        """Compare book and policy with themselves and with each other; takes time with the number of chunks.

        Raises:
            AssertionError: they contradict each other; the message says where.
        """
        self._book.check_integrity()
        self._policy.check_integrity()
        ready = self._book.ready
        if len(ready) != len(self._policy) or any(key not in self._policy for key in ready):
            raise AssertionError("the policy ranks other keys than those that can be read")
        if self._policy.used_bytes != sum(self._book.stride(chunk.group) for chunk in ready.values()):
            raise AssertionError("the policy counts other bytes than those that can be read")
        if self.used_bytes > self.capacity_bytes:
            raise AssertionError(f"{self.used_bytes} bytes are used, capacity is {self.capacity_bytes}")

    def _make_room(self, group: int) -> None:
        """Evict until a slot is free for the group, or nothing may leave, or too much would.

        The next to leave may be of another size. Its slot then waits for the next chunk of that size; when
        such slots come to a slab, one slab is emptied, so no size keeps more than a slab from the others.
        """
        stride, evicted = self._book.stride(group), 0
        while not self._book.slabs.has_room(stride) and evicted < self._most_evicted:
            keys = self._book.crowding(group)
            for key in keys:
                self._policy.remove(key)
            if not keys:
                victim = self._policy.evict()
                if victim is None:
                    return
                keys = [victim]
            evicted += sum(self._evict(key) for key in keys)

    def _evict(self, key: bytes) -> int:
        """Give up a chunk that the policy has let go; returns the bytes of its slot."""
        chunk = self._book.ready[key]
        self._book.evict(key)
        self.counters.evicted += 1
        self.counters.evicted_bytes += self._content(chunk)
        self._evicted[key] = None
        if len(self._evicted) > _REMEMBERED:
            self._evicted.popitem(last=False)
        return self._book.stride(chunk.group)

    def _distrust(self, chunk: Chunk) -> None:
        """The bytes of a chunk are not what was written, or may not be."""
        if chunk.state is State.EVICTED:
            return
        if chunk.state is State.READY:
            self._policy.remove(chunk.key)
        else:
            self._drop(Drop.FAILED)
        self._book.spoil(chunk)
        self.counters.damaged += 1

    def _trespassed(self, ticket: Ticket) -> None:
        """A rank reports on a store that was given up: what is there now may have been written over."""
        self.counters.late += 1
        for chunk in self._book.trespassed(ticket):
            self._distrust(chunk)

    def _drop(self, reason: Drop) -> None:
        self.counters.dropped[reason] += 1

    def _why_missed(self, key: bytes) -> Miss:
        if key in self._book.filling:
            return Miss.FILLING
        return Miss.EVICTED if key in self._evicted else Miss.ABSENT

    def _content(self, chunk: Chunk) -> int:
        return self._book.shapes[chunk.group].content_bytes
