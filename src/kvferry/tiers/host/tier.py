"""The host tier: chunks in shared host memory (the arena), evicted by a policy when it is full.

The tier does not copy bytes. It gives slots of the arena to the code that does:

    store   reserve ─▶ Slot ─▶ commit or abort
    load    open ─▶ Slot ─▶ close

The caller releases every slot when all ranks have finished and no copy or I/O is in flight. No call blocks.
If there is no room for a chunk, it is dropped and counted, and no exception is raised. Releasing a slot twice
raises KeyError.

The later chunks of a prompt are useless without the earlier ones, so evict the later ones first. Policies
evict the latest used chunks last. So commit and close the chunks of a prompt from its end to its beginning.
When the request has ended, call `mark_used`, because its steps and partial loads have used the chunks in
another order.
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
    """The host tier, which keeps chunks in the arena (host memory that all ranks of a node share).

    When the arena is full, the tier evicts chunks. Not thread-safe: only the engine's thread may use the
    object.

    Attributes:
        counters: counts of stores, loads and evictions since the tier was created.
        capacity_bytes: maximum bytes of all slots; never exceeded.
        keys: keys of the chunks that can be read.
    """

    def __init__(
        self,
        capacity_bytes: int,
        chunk_bytes: Sequence[int],
        policy: Callable[[int], EvictionPolicy],
        table: KeyTable | None = None,
    ) -> None:
        """Create an empty tier.

        Args:
            capacity_bytes: bytes of the arena (host memory that holds the chunks).
            chunk_bytes: bytes of a chunk, for each KV cache group; multiples of 4096.
            policy: function that returns an eviction policy for a capacity in bytes (`tiers.eviction`).
            table: hash table of chunk keys that the tiers of a cache share; None for a separate table.

        Raises:
            GeometryError: a chunk size is not a multiple of 4096.
            ConfigError: the arena is too small for these chunks.
        """
        self.counters = HostCounters()
        self._slots = SlotTable(capacity_bytes, chunk_bytes)
        self.capacity_bytes = self._slots.slabs.capacity_bytes
        self._make_policy = policy
        self._policy = policy(self.capacity_bytes)
        self.keys = TierKeys(table)
        self._most_evicted = (len(set(chunk_bytes)) + 1) * self._slots.slabs.slab_bytes

    def __len__(self) -> int:
        """Return the number of chunks in the tier that can be read."""
        return len(self._slots.ready)

    @property
    def used_bytes(self) -> int:
        """Number of bytes in all slots (memory of one chunk each) that are allocated."""
        return self._slots.slabs.used_bytes

    @property
    def holds(self) -> int:
        """Number of slots that `reserve`, `open` and `hold` have returned and that are not released yet."""
        return self._slots.holds

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return a mask of the keys whose chunks can be read now: bool of shape (len(keys),).

        The call does not count as a use of the chunks.
        """
        return self.keys.contains(tags_of(keys))

    def reserve(self, key: bytes, group: int, *, counted: bool = True) -> Slot | None:
        """Reserve a slot (memory of one chunk) for a new chunk. Evict other chunks if there is no free slot.

        Return None if the tier has the chunk already, if the chunk is being filled, or if too few other
        chunks can be evicted.

        Args:
            key: key of the chunk.
            group: index of the chunk's KV cache group.
            counted: whether a failure counts as a dropped chunk; False if the caller will retry.
        """
        if key in self._slots.ready or key in self._slots.filling:
            self.counters.dropped[HostDropReason.PRESENT] += counted
            return None
        self._make_room(group)
        slot = self._slots.reserve(key, group)
        if slot is None:
            self.counters.dropped[HostDropReason.NO_ROOM] += counted
        return slot

    def commit(self, slot: Slot, *, cold: bool = False) -> bool:
        """Make a chunk readable after its slot (memory of one chunk) was filled, and end the reservation.

        If `clear` was called since `reserve`, the chunk is dropped instead, and its slot is freed.

        Args:
            slot: slot that `reserve` returned.
            cold: True to evict the chunk before all others, until it is used.

        Returns:
            Whether the chunk can be read now.
        """
        if not self._slots.commit(slot):
            return False
        size = self._slots.chunk_bytes[slot.group]
        self._policy.admit(slot.key, size, cold=cold)
        self.keys.add(slot.key)
        self.counters.stored += 1
        self.counters.stored_bytes += size
        return True

    def abort(self, slot: Slot) -> None:
        """Free the slot (memory of one chunk) of a chunk that could not be filled, and count a dropped chunk.

        No copy or I/O may still use the slot.

        Args:
            slot: slot that `reserve` returned.
        """
        if self._slots.abort(slot):
            self.counters.dropped[HostDropReason.FAILED] += 1

    def open(self, key: bytes) -> Slot | None:
        """Hold a chunk for reading, and count a use. A held chunk stays in its memory until `close`.

        If the tier does not have the chunk, count a miss.

        Returns:
            The hold, which the caller must pass to `close`; None if the tier does not have the chunk.
        """
        chunk = self._slots.ready.get(key)
        if chunk is None:
            self.counters.misses[self.miss_reason(key)] += 1
            return None
        self._policy.touch(key)
        if not chunk.holds:
            self._policy.pin(key)
        self.counters.hits += 1
        return self._slots.open(key)

    def hold(self, key: bytes) -> Slot | None:
        """Hold a chunk for reading, but count neither a use nor a miss.

        A held chunk stays in its memory until `close`. Use this method to copy a chunk to another tier, or to
        load a chunk for which `open` has already counted a miss.

        Returns:
            The hold, which the caller must pass to `close`; None if the tier does not have the chunk.
        """
        chunk = self._slots.ready.get(key)
        if chunk is None:
            return None
        if not chunk.holds:
            self._policy.pin(key)
        return self._slots.open(key)

    def close(self, slot: Slot) -> None:
        """Release a hold that `open` or `hold` returned. A chunk without holds can be evicted."""
        if self._slots.close(slot):
            self._policy.unpin(slot.key)

    def mark_used(self, keys: Sequence[bytes], cold: Sequence[bytes] = ()) -> None:
        """Rank the chunks of a prompt as the most recently used chunks of the tier.

        Among these chunks, the last chunk of the prompt gets the lowest rank, so it is evicted first. Keys
        that the tier does not have are skipped.

        Args:
            keys: keys of the chunks in the order of the prompt.
            cold: keys of further chunks, which are evicted before all others until they are used.
        """
        self._policy.make_newest(keys[::-1])
        self._policy.make_cold(cold)

    def clear(self) -> None:
        """Remove all chunks from the tier, including those being filled.

        Call this when the stored KV is no longer valid: afterwards, none of it can be opened. The memory of a
        chunk that is being read or filled is reused only after `close`, `commit` or `abort`.
        """
        self.counters.dropped[HostDropReason.CLEARED] += self._slots.clear()
        self._policy = self._make_policy(self.capacity_bytes)
        self.keys.clear()

    def check_integrity(self) -> None:
        """Check that the slots, the eviction policy and `keys` have the same readable chunks.

        The time is proportional to the number of chunks.

        Raises:
            AssertionError: an inconsistency was found; the message describes it.
        """
        self._slots.check_integrity()
        self._policy.check_integrity()
        ready = self._slots.ready
        if len(ready) != len(self._policy) or any(key not in self._policy for key in ready):
            raise AssertionError("the policy ranks other keys than those that can be read")
        if len(ready) != len(self.keys) or not self.keys.contains(tags_of(list(ready))).all():
            raise AssertionError("other keys are told than those that can be read")
        if self._policy.used_bytes != sum(chunk.size for chunk in ready.values()):
            raise AssertionError("the policy counts other bytes than those that can be read")
        if self.used_bytes > self.capacity_bytes:
            raise AssertionError(f"{self.used_bytes} bytes are used, capacity is {self.capacity_bytes}")

    def _make_room(self, group: int) -> None:
        """Evict chunks until a KV cache group has a free slot for one more chunk.

        Stop earlier if all remaining chunks are held, or if `_most_evicted` bytes were evicted in this call.

        The eviction policy may choose chunks of another size, whose slots cannot hold a chunk of this group.
        When the free slots of such a size add up to a slab (part of the arena with slots of one size), evict
        all chunks of one slab with slots of that size, if none is held. Then the slab can be divided into
        slots for this group.

        Args:
            group: index of the KV cache group.
        """
        size, evicted = self._slots.chunk_bytes[group], 0
        while not self._slots.slabs.has_room(size) and evicted < self._most_evicted:
            if keys := self._slots.keys_to_reclaim(group):
                evicted += sum(map(self.evict, keys))
            elif (victim := self._policy.evict()) is not None:
                evicted += self._free(victim)
            else:
                return

    def evict(self, key: bytes) -> int:
        """Evict a chunk of the tier, whatever its rank. Return the bytes of its slot."""
        self._policy.remove(key)
        return self._free(key)

    def _free(self, key: bytes) -> int:
        """Free the slot of a chunk that has left the eviction policy's queues. Return the slot's bytes."""
        size = self._slots.evict(key).size
        self.keys.discard(key)
        self.counters.evicted += 1
        self.counters.evicted_bytes += size
        return size

    def miss_reason(self, key: bytes) -> HostMissReason:
        """Return the reason why a chunk cannot be read from this tier. Does not count a miss.

        Args:
            key: key of a chunk that is not readable now.
        """
        if key in self._slots.filling:
            return HostMissReason.FILLING
        return HostMissReason.EVICTED if self.keys.recently_evicted(key) else HostMissReason.ABSENT
