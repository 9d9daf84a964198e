"""The host tier: chunks in shared host memory, evicted by a policy when it is full.

The tier does not copy bytes. It gives slots of the arena to the code that does:

    store   reserve ─▶ Slot ─▶ commit or abort
    load    open ─▶ Slot ─▶ close

A slot has these states:

    FREE ─reserve→ FILLING ─commit→ READY ─evict→ FREE
                      │               └─evict during a read→ EVICTED ─last close→ FREE
                      ├─abort→ FREE
                      └─abandon, clear→ EVICTED ─commit or abort→ FREE

Only a READY chunk can be opened by its key. A `Slot` is a *hold*, which keeps the memory from being reused:
the fill has one, and so has each read. The caller releases it when all ranks have finished and no copy or I/O
is in flight, and not before, even if the request has ended or the chunk was evicted meanwhile. Releasing it
twice, or as what it is not, raises KeyError. No call blocks. If there is no room for a chunk, it is dropped
and counted, and no exception is raised.

The eviction policy hears of a chunk:

    commit      admit: it is the newest, or cold
    open, hold  pin, with the first read; `open` also counts a use (touch)
    close       unpin, after the last read: it is the newest again, unless it is cold
    mark_used   mark_used for the chunks that later prompts need, make_cold for those that none needs

So a stored chunk is admitted when the ranks have copied it, pinned while a slow tier writes it, and takes its
final rank when its request has ended and nothing of the request is copied any more. The later chunks of a
prompt are useless without the earlier ones, and the oldest are evicted first. So commit and close the chunks
of a prompt from its end to its beginning. `mark_used` ranks them so in any case, because the steps and
partial loads of a request have used its chunks in another order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from kvferry.common.errors import GeometryError
from kvferry.tiers.eviction import EvictionPolicy
from kvferry.tiers.host.settings import HostCounters, HostDropReason, HostMissReason
from kvferry.tiers.host.slabs import Slabs
from kvferry.tiers.index import KeyTable, TierKeys, tags_of
from kvferry.tiers.tenants import TenantUsage

# Direct I/O needs slots at page boundaries.
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """A hold on a slot, whose owner may read or fill the slot until it releases the hold."""

    key: bytes
    group: int
    offset: int  # byte offset of the slot in the arena, a multiple of 4096
    size: int  # bytes of the chunk
    serial: int  # number that identifies the hold, unique in the tier


@dataclass(slots=True, eq=False)
class Resident:
    """A chunk that occupies a slot: FILLING, READY, or evicted and still held.

    `digest` is that of its content, once another engine has asked for it (`tiers.fleet`).
    """

    key: bytes
    group: int
    offset: int
    size: int
    holds: int = 0
    digest: bytes = b""


class HostTier:
    """The host tier. Only the engine's thread may use it, except for `peek` and `readable_keys`.

    Args:
        capacity_bytes: bytes of the arena.
        chunk_bytes: bytes of a chunk, for each KV cache group; multiples of 4096.
        policy: make an eviction policy for a capacity in bytes.
        table: table that the tiers of a cache share; None for a separate one.
        ready_bytes: returns how many bytes from the beginning of the arena are allocated so far; None if all
            are. The other slots are not used yet.

    Attributes:
        counters: counts since the tier was created.
        capacity_bytes: maximum bytes of all slots; never exceeded.
        chunk_bytes: as given.
        keys: keys of the chunks that can be read.
        changes: gets (key, whether it can be read now) of each chunk that enters or leaves, and None if all
            leave; None to record nothing.

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
        ready_bytes: Callable[[], int] | None = None,
    ) -> None:
        if any(size < 1 or size % _PAGE_BYTES for size in chunk_bytes):
            raise GeometryError(f"chunks of {tuple(chunk_bytes)} bytes; expected multiples of {_PAGE_BYTES}")
        self.counters = HostCounters()
        self.changes: deque[tuple[bytes, bool] | None] | None = None
        self.chunk_bytes = tuple(chunk_bytes)
        self._slabs = Slabs(capacity_bytes, chunk_bytes, ready_bytes)
        self.capacity_bytes = self._slabs.capacity_bytes
        self._make_policy = policy
        self._policy = policy(self.capacity_bytes)
        self.keys = TierKeys(table)
        # Enough to empty a slab after evictions of each other size, and no more: a step must not evict
        # everything.
        self._most_evicted = (len(set(chunk_bytes)) + 1) * self._slabs.slab_bytes
        self._filling: dict[bytes, Resident] = {}
        self._ready: dict[bytes, Resident] = {}
        self._resident: dict[int, Resident] = {}  # by offset
        # The chunk of each hold, by its serial number.
        self._fills: dict[int, Resident] = {}
        self._reads: dict[int, Resident] = {}
        self._serials = count(1)

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def used_bytes(self) -> int:
        return self._slabs.used_bytes

    @property
    def tenants(self) -> Mapping[str, TenantUsage]:
        """Usage by the labels of tenants; empty if they do not share the tier by weight."""
        return self._policy.tenants

    @property
    def holds(self) -> int:
        """Number of holds that callers have not released yet."""
        return len(self._fills) + len(self._reads)

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return a mask of the keys whose chunks can be read now. This is no use of the chunks."""
        return self.keys.contains(tags_of(keys))

    def peek(self, key: bytes) -> Resident | None:
        """Return a chunk that can be read now, without a hold. Any thread may call this.

        The bytes of its slot do not change for as long as `peek` returns the same object.
        """
        return self._ready.get(key)

    def readable_keys(self) -> list[bytes]:
        """Return the keys of all chunks that can be read now. Any thread may call this."""
        return list(self._ready)

    def reserve(self, key: bytes, group: int, *, counted: bool = True) -> Slot | None:
        """Reserve a slot for a new chunk, and evict other chunks for it; None if that is not possible.

        A failure is `counted` as a dropped chunk, unless the caller will retry.
        """
        if key in self._ready or key in self._filling:
            self.counters.dropped[HostDropReason.PRESENT] += counted
            return None
        size, evicted, offset = self.chunk_bytes[group], 0, None
        self._policy.expect(key, size)
        while (over := self._policy.is_over_limit) or (offset := self._slabs.take(size)) is None:
            if evicted >= self._most_evicted:
                break
            # The policy may have chosen chunks of another size. When their free slots add up to a slab, one
            # slab of that size is emptied, and can be divided into slots for this group.
            if not over and (keys := self._keys_to_reclaim(size)):
                evicted += sum(map(self.evict, keys))
            elif (victim := self._policy.evict()) is not None:
                evicted += self._free(victim)
            else:
                break
        if offset is None:
            self._policy.unexpect(key)
            self.counters.dropped[HostDropReason.NO_ROOM] += counted
            return None
        chunk = Resident(key, group, offset, size)
        self._filling[key] = self._resident[offset] = chunk
        return self._hold(chunk, self._fills)

    def commit(self, slot: Slot, *, cold: bool = False) -> bool:
        """Make a filled chunk readable. Return False if `clear` has dropped it since `reserve`."""
        chunk = self._end_fill(slot)
        if chunk is None:
            return False
        self._ready[slot.key] = chunk
        self._policy.admit(slot.key, slot.size, cold=cold)
        self.keys.add(slot.key)
        if self.changes is not None:
            self.changes.append((slot.key, True))
        self.counters.stored += 1
        self.counters.stored_bytes += slot.size
        return True

    def abort(self, slot: Slot) -> None:
        """Free the slot of a chunk that could not be filled. No copy or I/O may still use it."""
        chunk = self._end_fill(slot)
        if chunk is not None:
            self._policy.unexpect(slot.key)
            self._free_if_unused(chunk)
            self.counters.dropped[HostDropReason.FAILED] += 1

    def abandon(self, slot: Slot) -> bool:
        """Let the chunk be filled in another slot. This one is not reused before `abort`.

        Return False if `clear` has dropped it since `reserve`.
        """
        if self._filling.get(slot.key) is not self._fills[slot.serial]:
            return False
        del self._filling[slot.key]
        self._policy.unexpect(slot.key)
        return True

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
        chunk = self._ready.get(key)
        if chunk is None:
            return None
        if not chunk.holds:
            self._policy.pin(key)
        return self._hold(chunk, self._reads)

    def close(self, slot: Slot) -> None:
        chunk = self._reads.pop(slot.serial)
        chunk.holds -= 1
        if chunk.holds:
            return
        if self._ready.get(chunk.key) is chunk:
            self._policy.unpin(chunk.key)
        else:
            self._free_if_unused(chunk)

    def mark_used(self, keys: Sequence[bytes], cold: Sequence[bytes] = (), tokens: int = 0) -> None:
        """Rank chunks, in the order of their prompt, as used last, and `cold` ones to be evicted first.

        `tokens` is the length of the prefix that ends with the last of `keys`.
        """
        self._policy.mark_used(keys, tokens)
        self._policy.make_cold(cold)

    def make_cold(self, keys: Sequence[bytes]) -> None:
        """Have chunks evicted first, the first of them before the others, until they are used."""
        self._policy.make_cold(keys)

    def evict(self, key: bytes) -> int:
        """Evict a chunk, whatever its rank. Return the bytes of its slot."""
        self._policy.remove(key)
        return self._free(key)

    def clear(self) -> None:
        """Remove all chunks, also those being filled. A held chunk's memory is reused after its release."""
        self.counters.dropped[HostDropReason.CLEARED] += len(self._filling)
        self._filling.clear()
        for key in list(self._ready):
            self._free_if_unused(self._ready.pop(key))
        self._policy = self._make_policy(self.capacity_bytes)
        self.keys.clear()
        if self.changes is not None:
            self.changes.append(None)

    def miss_reason(self, key: bytes) -> HostMissReason:
        """Return why a chunk cannot be read from this tier, without counting a miss."""
        if key in self._filling:
            return HostMissReason.FILLING
        return HostMissReason.EVICTED if key in self.keys.recently_evicted else HostMissReason.ABSENT

    def check_integrity(self) -> None:
        """Check that slots, policy and keys have the same chunks, or raise AssertionError: O(chunks)."""
        self._check_slots()
        self._policy.check_integrity()
        ready = self._ready
        if len(ready) != len(self._policy) or any(key not in self._policy for key in ready):
            raise AssertionError("the policy ranks other keys than those that can be read")
        if len(ready) != len(self.keys) or not self.keys.contains(tags_of(list(ready))).all():
            raise AssertionError("other keys are told than those that can be read")
        if self._policy.used_bytes != sum(chunk.size for chunk in ready.values()):
            raise AssertionError("the policy counts other bytes than those that can be read")
        if self.used_bytes > self.capacity_bytes:
            raise AssertionError(f"{self.used_bytes} bytes are used, capacity is {self.capacity_bytes}")

    def _check_slots(self) -> None:
        self._slabs.check_integrity()
        for key, chunk in (*self._filling.items(), *self._ready.items()):
            if chunk.key != key or self._resident.get(chunk.offset) is not chunk:
                raise AssertionError(f"{chunk} is found by {key.hex()}, but is not in its slot")
        fills = Counter(chunk.offset for chunk in self._fills.values())
        reads = Counter(chunk.offset for chunk in self._reads.values())
        filling, ready = (
            {chunk.offset for chunk in keyed.values()} for keyed in (self._filling, self._ready)
        )
        if not filling <= fills.keys() or filling & reads.keys() or ready & fills.keys():
            raise AssertionError("a chunk is FILLING without a fill or with a read, or READY with a fill")
        end = taken = 0
        for offset, chunk in sorted(self._resident.items()):
            if chunk.offset != offset or offset < end:
                raise AssertionError(f"{chunk} at {offset}, after bytes until {end}")
            if chunk.holds != fills[offset] + reads[offset] or not (chunk.holds or offset in ready):
                raise AssertionError(f"{chunk}, held {fills[offset]} + {reads[offset]} times")
            end, taken = offset + chunk.size, taken + chunk.size
        if taken != self.used_bytes or not (fills | reads).keys() <= self._resident.keys():
            raise AssertionError("slots are taken or held that no chunk is in")

    def _hold(self, chunk: Resident, holds: dict[int, Resident]) -> Slot:
        serial = next(self._serials)
        holds[serial] = chunk
        chunk.holds += 1
        return Slot(chunk.key, chunk.group, chunk.offset, chunk.size, serial)

    def _end_fill(self, slot: Slot) -> Resident | None:
        """Release the hold of `reserve`. Return the chunk, or free its slot if `clear` has dropped it."""
        chunk = self._fills.pop(slot.serial)
        chunk.holds -= 1
        # After `clear`, another chunk of the same key may be filled: compare the chunk, not the key.
        if self._filling.get(slot.key) is chunk:
            return self._filling.pop(slot.key)
        self._free_if_unused(chunk)
        return None

    def _free(self, key: bytes) -> int:
        chunk = self._ready.pop(key)
        self._free_if_unused(chunk)
        self.keys.discard(key)
        if self.changes is not None:
            self.changes.append((key, False))
        self.counters.evicted += 1
        self.counters.evicted_bytes += chunk.size
        return chunk.size

    def _free_if_unused(self, chunk: Resident) -> None:
        """Free the slot of a chunk that is neither FILLING nor READY, unless it is held."""
        if not chunk.holds:
            del self._resident[chunk.offset]
            self._slabs.free(chunk.offset)

    def _keys_to_reclaim(self, size: int) -> list[bytes]:
        """Return the keys of the chunks in a slab that is reclaimable for a size and not held, if any."""
        found = list[bytes]()
        for slab in self._slabs.reclaimable(size):
            chunks = [self._resident[at] for at in self._slabs.slots(slab) if at in self._resident]
            if not any(chunk.holds for chunk in chunks):
                keys = [chunk.key for chunk in chunks]
                if self._policy.may_evict(keys):
                    return keys
                # Without any such slab, one that the policy would keep: no size may starve.
                found = found or keys
        return found
