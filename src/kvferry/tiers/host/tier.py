"""The host tier: chunks in an arena, within its capacity, the least useful leave first.

It touches no chunk: it answers with slots, for those who move the bytes.

    store   reserve ─▶ Slot ─▶ commit or abort
    load    open ─▶ Slot ─▶ close

Every slot is given back by one of these, once all ranks have done and nothing is in flight any more; until
then it stays the caller's. Nothing here waits, and nothing that can be foreseen raises: a store that finds no
room is dropped, and counted. A slot that is given back twice is the caller's mistake, and a KeyError.

A prompt's later chunks are of no use without the earlier ones, and policies keep longest what was used last:
so commit, and close, the chunks of a prompt from its end to its beginning, and when it is over, say that they
were `used`: steps and loads in several parts have left them in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.tiers.eviction import EvictionPolicy
from kvferry.tiers.host.counters import HostCounters, HostDropReason, HostMissReason
from kvferry.tiers.host.slot_table import Slot, SlotTable
from kvferry.tiers.index.key_table import KeyTable, tags_of
from kvferry.tiers.index.tier_keys import TierKeys

__all__ = ["HostTier", "Slot"]


class HostTier:
    """Not thread-safe: one thread (the engine's) calls it.

    Attributes:
        counters: what it has done.
        capacity_bytes, used_bytes: of slots; the first is never exceeded.
        keys: of the chunks that can be read.
    """

    def __init__(
        self,
        capacity_bytes: int,
        chunk_bytes: Sequence[int],
        policy: Callable[[int], EvictionPolicy],
        table: KeyTable | None = None,
    ) -> None:
        """Empty.

        Args:
            capacity_bytes: of the arena.
            chunk_bytes: of a chunk of every KV cache group, multiples of 4096.
            policy: makes one for a capacity in bytes (`kvferry.tiers.eviction.EVICTION_POLICIES`).
            table: for the tags of all places of a cache.

        Raises:
            GeometryError: chunks are not whole pages.
            ConfigError: the arena is too small for them.
        """
        self.counters = HostCounters()
        self._book = SlotTable(capacity_bytes, chunk_bytes)
        self.capacity_bytes = self._book.slabs.capacity_bytes
        self._make_policy = policy
        self._policy = policy(self.capacity_bytes)
        self.keys = TierKeys(table)
        self._most_evicted = (len(set(chunk_bytes)) + 1) * self._book.slabs.slab_bytes

    def __len__(self) -> int:
        """Chunks that can be read."""
        return len(self._book.ready)

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that are not free."""
        return self._book.slabs.used_bytes

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which of these could be opened now: bool of shape (len(keys),). Changes and counts nothing."""
        return self.keys.contains(tags_of(keys))

    def reserve(self, key: bytes, group: int, *, counted: bool = True) -> Slot | None:
        """Make room for a chunk, where need be by evicting others; None if there is none, or it is here.

        Args:
            key: of the chunk.
            group: what it holds.
            counted: as a drop, if there is no room or no need; not by who asks again.
        """
        if key in self._book.ready or key in self._book.filling:
            self.counters.dropped[HostDropReason.PRESENT] += counted
            return None
        self._make_room(group)
        slot = self._book.reserve(key, group)
        if slot is None:
            self.counters.dropped[HostDropReason.NO_ROOM] += counted
        return slot

    def commit(self, slot: Slot) -> bool:
        """All bytes of the chunk are there: from now on it is found. False if all was forgotten meanwhile."""
        if not self._book.commit(slot):
            return False
        size = self._book.chunk_bytes[slot.group]
        self._policy.admit(slot.key, size)
        self.keys.add(slot.key)
        self.counters.stored += 1
        self.counters.stored_bytes += size
        return True

    def abort(self, slot: Slot) -> None:
        """The chunk was not filled, and nothing is in flight any more."""
        if self._book.abort(slot):
            self.counters.dropped[HostDropReason.FAILED] += 1

    def open(self, key: bytes) -> Slot | None:
        """Hold a chunk for reading, every call anew; None if it is not here, which is counted."""
        chunk = self._book.ready.get(key)
        if chunk is None:
            self.counters.misses[self.miss_reason(key)] += 1
            return None
        self._policy.touch(key)
        if not chunk.holds:
            self._policy.pin(key)
        self.counters.hits += 1
        self.counters.hit_bytes += chunk.size
        return self._book.open(key)

    def hold(self, key: bytes) -> Slot | None:
        """As `open`, for who does not use the chunk but moves it on: nothing is counted."""
        chunk = self._book.ready.get(key)
        if chunk is None:
            return None
        if not chunk.holds:
            self._policy.pin(key)
        return self._book.open(key)

    def close(self, slot: Slot) -> None:
        """It is read no more by this hold."""
        if self._book.close(slot):
            self._policy.unpin(slot.key)

    def mark_used(self, keys: Sequence[bytes]) -> None:
        """A prompt's chunks were used, from its beginning on: of those here, its end leaves first."""
        for key in reversed(keys):
            if key in self._book.ready:
                self._policy.renew(key)

    def clear(self) -> None:
        """Forget all chunks, and those being filled: what the keys named has changed."""
        self.counters.dropped[HostDropReason.CLEARED] += self._book.clear()
        self._policy = self._make_policy(self.capacity_bytes)
        self.keys.clear()

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
        if len(ready) != len(self.keys) or not self.keys.contains(tags_of(list(ready))).all():
            raise AssertionError("other keys are told than those that can be read")
        if self._policy.used_bytes != sum(chunk.size for chunk in ready.values()):
            raise AssertionError("the policy counts other bytes than those that can be read")
        if self.used_bytes > self.capacity_bytes:
            raise AssertionError(f"{self.used_bytes} bytes are used, capacity is {self.capacity_bytes}")

    def _make_room(self, group: int) -> None:
        """Evict until a slot is free for the group, or nothing may leave, or too much would.

        The next to leave may be of another size. Its slot then waits for the next chunk of that size; when
        such slots come to a slab, one slab is emptied, so no size keeps more than a slab from the others.
        """
        size, evicted = self._book.chunk_bytes[group], 0
        while not self._book.slabs.has_room(size) and evicted < self._most_evicted:
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
        """Give up a chunk that the policy has let go; returns its bytes."""
        size = self._book.evict(key).size
        self.keys.discard(key)
        self.counters.evicted += 1
        self.counters.evicted_bytes += size
        return size

    def miss_reason(self, key: bytes) -> HostMissReason:
        """Why a chunk is not here. Counts nothing."""
        if key in self._book.filling:
            return HostMissReason.FILLING
        return HostMissReason.EVICTED if self.keys.recently_evicted(key) else HostMissReason.ABSENT
