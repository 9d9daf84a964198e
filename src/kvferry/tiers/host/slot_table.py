"""The slots of an arena, and holds that permit reading or writing them.

A chunk takes one slot:

    FREE ─reserve→ FILLING ─commit→ READY ─evict, nobody reads→ FREE
                      │               └─evict while read→ EVICTED ─last close→ FREE
                      ├─abort→ FREE
                      └─clear→ EVICTED ─commit or abort→ FREE

Only a READY chunk is found by its key. A *hold* protects a slot while bytes move: one hold for the fill, one
for every read. Its owner releases it when no copy or I/O is in flight, whatever happened to the request or
the key meanwhile. Until then the slot is not reused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from kvferry.errors import GeometryError
from kvferry.tiers.host.slabs import Slabs

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """A hold on a chunk's slot: its owner may read or fill the slot until it releases the hold.

    Attributes:
        key: key of the chunk.
        group: index of the KV cache group.
        offset: bytes from the start of the arena, a multiple of 4096.
        serial: unique number of the hold.
    """

    key: bytes
    group: int
    offset: int
    serial: int


@dataclass(slots=True)
class ResidentChunk:
    """A chunk in a slot that is not free; EVICTED if it is neither in `filling` nor in `ready`.

    Attributes:
        key, group, offset: as in `Slot`.
        size: bytes.
        holds: number of holds.
    """

    key: bytes
    group: int
    offset: int
    size: int
    holds: int = 0


class SlotTable:
    """The states of all slots of an arena. Touches no memory. Not thread-safe.

    Attributes:
        chunk_bytes: bytes of a chunk of each group.
        slabs: the allocator of slots.
        filling, ready: chunks in these states, by key. Read only.
    """

    def __init__(self, capacity_bytes: int, chunk_bytes: Sequence[int]) -> None:
        """Create the table with all slots free.

        Args:
            capacity_bytes: bytes of the arena.
            chunk_bytes: bytes of a chunk of each group, multiples of 4096.

        Raises:
            GeometryError: a chunk size is not a multiple of 4096.
            ConfigError: the arena is too small for these chunks.
        """
        if any(size < 1 or size % _PAGE_BYTES for size in chunk_bytes):
            raise GeometryError(f"chunks of {tuple(chunk_bytes)} bytes; expected multiples of {_PAGE_BYTES}")
        self.chunk_bytes = tuple(chunk_bytes)
        self.slabs = Slabs(capacity_bytes, chunk_bytes)
        self.filling: dict[bytes, ResidentChunk] = {}
        self.ready: dict[bytes, ResidentChunk] = {}
        self._slots: dict[int, ResidentChunk] = {}
        self._fills: dict[int, ResidentChunk] = {}
        self._reads: dict[int, ResidentChunk] = {}
        self._serials = count(1)

    def reserve(self, key: bytes, group: int) -> Slot | None:
        """Move a slot from FREE to FILLING; None if none is free. The key has no other slot."""
        size = self.chunk_bytes[group]
        offset = self.slabs.take(size)
        if offset is None:
            return None
        chunk = ResidentChunk(key, group, offset, size)
        self.filling[key] = self._slots[offset] = chunk
        return self._hold(chunk, self._fills)

    def commit(self, slot: Slot) -> bool:
        """Move FILLING to READY, or EVICTED to FREE; return whether it is READY. KeyError without a hold."""
        wanted = self.filling.get(slot.key) is self._fills[slot.serial]
        if wanted:
            self.ready[slot.key] = self.filling.pop(slot.key)
        self._let_go(slot, self._fills)
        return wanted

    def abort(self, slot: Slot) -> bool:
        """Move FILLING or EVICTED to FREE; return whether it was FILLING. KeyError without a hold."""
        wanted = self.filling.get(slot.key) is self._fills[slot.serial]
        if wanted:
            del self.filling[slot.key]
        self._let_go(slot, self._fills)
        return wanted

    def open(self, key: bytes) -> Slot:
        """Hold a READY chunk for reading. Raises KeyError if the key has none."""
        return self._hold(self.ready[key], self._reads)

    def close(self, slot: Slot) -> bool:
        """Release a read's hold; return whether it was the last of a READY chunk. KeyError without a hold."""
        chunk = self._let_go(slot, self._reads)
        return self._is_ready(chunk) and not chunk.holds

    def evict(self, key: bytes) -> ResidentChunk:
        """Move READY to FREE, or to EVICTED while it is read. Raises KeyError if the key has none."""
        chunk = self.ready.pop(key)
        self._free_if_over(chunk)
        return chunk

    def clear(self) -> int:
        """Move FILLING and READY to EVICTED or FREE; return how many were FILLING."""
        for key in list(self.ready):
            self.evict(key)
        unfilled = len(self.filling)
        self.filling.clear()
        return unfilled

    def keys_to_reclaim(self, group: int) -> list[bytes]:
        """Return keys whose eviction empties a slab of another size for this group.

        The slab has no holds, and the free slots of its size add up to a slab.
        """
        for slab in self.slabs.reclaimable(self.chunk_bytes[group]):
            chunks = [self._slots[at] for at in self.slabs.slots(slab) if at in self._slots]
            if not any(chunk.holds for chunk in chunks):
                return [chunk.key for chunk in chunks]
        return []

    def check_integrity(self) -> None:
        """Check that all states agree. Takes time with the number of chunks.

        Raises:
            AssertionError: they do not; the message names the contradiction.
        """
        self.slabs.check_integrity()
        for key, chunk in (*self.filling.items(), *self.ready.items()):
            if chunk.key != key or self._slots.get(chunk.offset) is not chunk:
                raise AssertionError(f"{chunk} is found by {key.hex()}, but is not in its slot")
        fills = Counter(chunk.offset for chunk in self._fills.values())
        reads = Counter(chunk.offset for chunk in self._reads.values())
        filling, ready = ({chunk.offset for chunk in keyed.values()} for keyed in (self.filling, self.ready))
        if not filling <= fills.keys() or filling & reads.keys() or ready & fills.keys():
            raise AssertionError("a chunk is FILLING without a fill or with a read, or READY with a fill")
        end = taken = 0
        for offset, chunk in sorted(self._slots.items()):
            if chunk.offset != offset or offset < end:
                raise AssertionError(f"{chunk} at {offset}, after bytes until {end}")
            if chunk.holds != fills[offset] + reads[offset] or not (chunk.holds or offset in ready):
                raise AssertionError(f"{chunk}, held {fills[offset]} + {reads[offset]} times")
            end, taken = offset + chunk.size, taken + chunk.size
        if taken != self.slabs.used_bytes or not (fills | reads).keys() <= self._slots.keys():
            raise AssertionError("slots are taken or held that no chunk is in")

    def _is_ready(self, chunk: ResidentChunk) -> bool:
        """Return whether this chunk is READY, rather than a later one with the same key."""
        return self.ready.get(chunk.key) is chunk

    def _hold(self, chunk: ResidentChunk, holds: dict[int, ResidentChunk]) -> Slot:
        serial = next(self._serials)
        holds[serial] = chunk
        chunk.holds += 1
        return Slot(chunk.key, chunk.group, chunk.offset, serial)

    def _let_go(self, slot: Slot, holds: dict[int, ResidentChunk]) -> ResidentChunk:
        chunk = holds.pop(slot.serial)
        chunk.holds -= 1
        self._free_if_over(chunk)
        return chunk

    def _free_if_over(self, chunk: ResidentChunk) -> None:
        """Move EVICTED to FREE if there is no hold."""
        if not chunk.holds and not self._is_ready(chunk):
            del self._slots[chunk.offset]
            self.slabs.free(chunk.offset)
