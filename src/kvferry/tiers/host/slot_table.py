"""The states of the slots of an arena, and the holds that protect slots while they are read or written.

A chunk occupies one slot, which has these states:

    FREE ─reserve→ FILLING ─commit→ READY ─evict without reads→ FREE
                      │               └─evict during a read→ EVICTED ─last close→ FREE
                      ├─abort→ FREE
                      └─clear→ EVICTED ─commit or abort→ FREE

Only a READY chunk can be opened by its key. A *hold* keeps a slot from being reused: the fill has one hold,
and so has each read. The owner of a hold releases it when no copy or I/O is in flight, and not before, even
if the request has ended or the chunk was evicted meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from kvferry.errors import GeometryError
from kvferry.tiers.host.slabs import Slabs

# Direct I/O needs slots at page boundaries.
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """A hold on a slot, whose owner may read or fill the slot until it releases the hold."""

    key: bytes
    group: int
    offset: int  # byte offset of the slot in the arena, a multiple of 4096
    serial: int  # number that identifies the hold, unique in the table


@dataclass(slots=True)
class ResidentChunk:
    """A chunk that occupies a slot.

    It is in `SlotTable.filling` or `SlotTable.ready`, unless it is evicted and still held.
    """

    key: bytes
    group: int
    offset: int
    size: int
    holds: int = 0


class SlotTable:
    """The states of all slots of an arena, whose memory it does not access. Not thread-safe.

    To release a hold twice, or to open or evict a chunk that is not READY, is a KeyError.

    Args:
        capacity_bytes: bytes of the arena.
        chunk_bytes: bytes of a chunk, for each KV cache group; multiples of 4096.

    Attributes:
        filling, ready: chunks in the state FILLING or READY, by key. Callers must not change them.

    Raises:
        GeometryError: a chunk size is not a multiple of 4096.
        ConfigError: the arena is too small for these chunks.
    """

    def __init__(self, capacity_bytes: int, chunk_bytes: Sequence[int]) -> None:
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

    @property
    def holds(self) -> int:
        """Number of holds that are not released yet."""
        return len(self._fills) + len(self._reads)

    def reserve(self, key: bytes, group: int) -> Slot | None:
        """Allocate a slot for a chunk with a new key; None if no slot of the group's size is free."""
        size = self.chunk_bytes[group]
        offset = self.slabs.take(size)
        if offset is None:
            return None
        chunk = ResidentChunk(key, group, offset, size)
        self.filling[key] = self._slots[offset] = chunk
        return self._hold(chunk, self._fills)

    def commit(self, slot: Slot) -> bool:
        """Make a filled chunk READY, and release the hold of `reserve`. Return False if it was cleared."""
        # After `clear`, another chunk of the same key may be filled: compare the chunk, not the key.
        wanted = self.filling.get(slot.key) is self._fills[slot.serial]
        if wanted:
            self.ready[slot.key] = self.filling.pop(slot.key)
        # After the change of state, which decides whether the slot is freed.
        self._release_hold(slot, self._fills)
        return wanted

    def abort(self, slot: Slot) -> bool:
        """Release the hold of `reserve` on a chunk that was not filled. Return False if it was cleared."""
        wanted = self.filling.get(slot.key) is self._fills[slot.serial]
        if wanted:
            del self.filling[slot.key]
        self._release_hold(slot, self._fills)
        return wanted

    def open(self, key: bytes) -> Slot:
        """Return a new hold on a READY chunk."""
        return self._hold(self.ready[key], self._reads)

    def close(self, slot: Slot) -> bool:
        """Release a hold of `open`. Return whether the chunk is still READY and has no other hold."""
        chunk = self._release_hold(slot, self._reads)
        return self._is_ready(chunk) and not chunk.holds

    def evict(self, key: bytes) -> ResidentChunk:
        """Evict a READY chunk and return it. Its slot becomes FREE, or EVICTED until the last read ends."""
        chunk = self.ready.pop(key)
        self._free_if_unused(chunk)
        return chunk

    def clear(self) -> int:
        """Evict all chunks, also those being filled. Return the number of those."""
        for key in list(self.ready):
            self.evict(key)
        unfilled = len(self.filling)
        self.filling.clear()
        return unfilled

    def keys_to_reclaim(self, group: int) -> list[bytes]:
        """Return the keys of the chunks in a slab that is reclaimable for a group and not held, if any."""
        for slab in self.slabs.reclaimable(self.chunk_bytes[group]):
            chunks = [self._slots[at] for at in self.slabs.slots(slab) if at in self._slots]
            if not any(chunk.holds for chunk in chunks):
                return [chunk.key for chunk in chunks]
        return []

    def check_integrity(self) -> None:
        """Check that chunks, holds and slabs agree, or raise AssertionError. It takes O(chunks)."""
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
        """Return whether `ready` contains this chunk, and not another one with the same key."""
        return self.ready.get(chunk.key) is chunk

    def _hold(self, chunk: ResidentChunk, holds: dict[int, ResidentChunk]) -> Slot:
        serial = next(self._serials)
        holds[serial] = chunk
        chunk.holds += 1
        return Slot(chunk.key, chunk.group, chunk.offset, serial)

    def _release_hold(self, slot: Slot, holds: dict[int, ResidentChunk]) -> ResidentChunk:
        chunk = holds.pop(slot.serial)
        chunk.holds -= 1
        self._free_if_unused(chunk)
        return chunk

    def _free_if_unused(self, chunk: ResidentChunk) -> None:
        if not chunk.holds and not self._is_ready(chunk):
            del self._slots[chunk.offset]
            self.slabs.free(chunk.offset)
