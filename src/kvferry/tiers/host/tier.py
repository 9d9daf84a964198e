"""The host tier: chunks in shared host memory, evicted by a policy when it is full.

The tier does not copy bytes. It gives slots of the arena to the code that does:

    store   reserve ─▶ Slot ─▶ commit or abort
    load    open ─▶ Slot ─▶ close

The caller releases every slot when all ranks have finished and no copy or I/O is in flight. Releasing a slot
twice raises KeyError. No call blocks. If there is no room for a chunk, it is dropped and counted, and no
exception is raised.

The later chunks of a prompt are useless without the earlier ones. Policies evict the latest used chunks last.
So commit and close the chunks of a prompt from its end to its beginning. When the request has ended, call
`mark_used`, because its steps and partial loads have used the chunks in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.tiers.eviction import EvictionPolicy
from kvferry.tiers.host.settings import HostCounters, HostDropReason, HostMissReason
from kvferry.tiers.host.slots import Slot, SlotTable
from kvferry.tiers.index.key_table import KeyTable, tags_of
from kvferry.tiers.index.tier_keys import TierKeys

__all__ = ["HostTier", "Slot"]


class HostTier:
    """The host tier. Not thread-safe: only the engine's thread may use it.

    Args:
        capacity_bytes: bytes of the arena.
        chunk_bytes: bytes of a chunk, for each KV cache group; multiples of 4096.
        policy: make an eviction policy for a capacity in bytes.
        table: table that the tiers of a cache share; None for a separate one.

    Attributes:
        counters: counts since the tier was created.
        capacity_bytes: maximum bytes of all slots; never exceeded.
        keys: keys of the chunks that can be read.

    Raises:
        GeometryError: a chunk size is not a multiple of 4096.
        ConfigError: the arena is too small for these chunks.
    """

    def __init__(
        self,
        capacity_bytes: int,
        chunk_bytes: Sequence[int],
        policy: Callable[[int], EvictionPolicy],
        table: KeyTable | None = None,
    ) -> None:
        self.counters = HostCounters()
        self._slots = SlotTable(capacity_bytes, chunk_bytes)
        self.capacity_bytes = self._slots.slabs.capacity_bytes
        self._make_policy = policy
        self._policy = policy(self.capacity_bytes)
        self.keys = TierKeys(table)
        # Enough to empty a slab after evictions of each other size, and no more: a step must not evict
        # everything.
        self._most_evicted = (len(set(chunk_bytes)) + 1) * self._slots.slabs.slab_bytes

    def __len__(self) -> int:
        return len(self._slots.ready)

    @property
    def used_bytes(self) -> int:
        return self._slots.slabs.used_bytes

    @property
    def holds(self) -> int:
        """Number of holds that callers have not released yet."""
        return self._slots.holds

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return a mask of the keys whose chunks can be read now. This is no use of the chunks."""
        return self.keys.contains(tags_of(keys))

    def reserve(self, key: bytes, group: int, *, counted: bool = True) -> Slot | None:
        """Reserve a slot for a new chunk, and evict other chunks for it; None if that is not possible.

        Args:
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
        """Make a filled chunk readable. Return False if `clear` has dropped it since `reserve`."""
        if not self._slots.end_fill(slot, filled=True):
            return False
        size = self._slots.chunk_bytes[slot.group]
        self._policy.admit(slot.key, size, cold=cold)
        self.keys.add(slot.key)
        self.counters.stored += 1
        self.counters.stored_bytes += size
        return True

    def abort(self, slot: Slot) -> None:
        """Free the slot of a chunk that could not be filled. No copy or I/O may still use it."""
        if self._slots.end_fill(slot, filled=False):
            self.counters.dropped[HostDropReason.FAILED] += 1

    def open(self, key: bytes) -> Slot | None:
        """Hold a chunk for reading until `close`, and count a use; or count a miss and return None."""
        slot = self.hold(key)
        if slot is None:
            self.counters.misses[self.miss_reason(key)] += 1
            return None
        self._policy.touch(key)
        self.counters.hits += 1
        return slot

    def hold(self, key: bytes) -> Slot | None:
        """Hold a chunk as `open` does, but count neither a use nor a miss."""
        chunk = self._slots.ready.get(key)
        if chunk is None:
            return None
        if not chunk.holds:
            self._policy.pin(key)
        return self._slots.open(key)

    def close(self, slot: Slot) -> None:
        """Release a hold of `open` or `hold`."""
        if self._slots.close(slot):
            self._policy.unpin(slot.key)

    def mark_used(self, keys: Sequence[bytes], cold: Sequence[bytes] = ()) -> None:
        """Rank chunks, in the order of their prompt, as used last, and `cold` ones to be evicted first."""
        # The last chunk of the prompt gets the lowest rank, so it is evicted first.
        self._policy.make_newest(keys[::-1])
        self._policy.make_cold(cold)

    def clear(self) -> None:
        """Remove all chunks, also those being filled. A held chunk's memory is reused after its release."""
        self.counters.dropped[HostDropReason.CLEARED] += self._slots.clear()
        self._policy = self._make_policy(self.capacity_bytes)
        self.keys.clear()

    def check_integrity(self) -> None:
        """Check that slots, policy and keys have the same chunks, or raise AssertionError: O(chunks)."""
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
        """Evict chunks until a group has a free slot, all are held, or `_most_evicted` bytes are evicted."""
        size, evicted = self._slots.chunk_bytes[group], 0
        while not self._slots.slabs.has_room(size) and evicted < self._most_evicted:
            # The policy may have chosen chunks of another size. When their free slots add up to a slab, one
            # slab of that size is emptied, and can be divided into slots for this group.
            if keys := self._slots.keys_to_reclaim(group):
                evicted += sum(map(self.evict, keys))
            elif (victim := self._policy.evict()) is not None:
                evicted += self._free(victim)
            else:
                return

    def evict(self, key: bytes) -> int:
        """Evict a chunk, whatever its rank. Return the bytes of its slot."""
        self._policy.remove(key)
        return self._free(key)

    def _free(self, key: bytes) -> int:
        size = self._slots.evict(key).size
        self.keys.discard(key)
        self.counters.evicted += 1
        self.counters.evicted_bytes += size
        return size

    def miss_reason(self, key: bytes) -> HostMissReason:
        """Return why a chunk cannot be read from this tier, without counting a miss."""
        if key in self._slots.filling:
            return HostMissReason.FILLING
        return HostMissReason.EVICTED if self.keys.recently_evicted(key) else HostMissReason.ABSENT
