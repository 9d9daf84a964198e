"""Who may touch which bytes of an arena.

A chunk takes one slot:

    FREE ─reserve→ FILLING ─commit→ READY ─evict, nobody reads→ FREE
                      │               └─evict while read→ EVICTED ─last close→ FREE
                      ├─abort→ FREE
                      └─clear→ EVICTED ─commit or abort→ FREE

Only READY is found by its key. A *hold* stands for whoever moves bytes in a slot: one for the fill, one for
every read. Whoever has a hold gives it back when nothing is in flight any more, whatever became of the
request, of the key, of the clock; until then the slot is never given out.
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
    """Where a chunk lies, for one who may move its bytes until the hold is given back.

    Attributes:
        key: names the chunk's content.
        group: index of the KV cache group.
        offset: bytes from the start of the arena to the chunk, whole pages.
        serial: number of the hold; no two are the same.
    """

    key: bytes
    group: int
    offset: int
    serial: int


@dataclass(slots=True)
class ResidentChunk:
    """A slot that is not free; EVICTED if the book has it neither in `filling` nor in `ready`.

    Attributes:
        key, group, offset: as of `Slot`.
        size: bytes.
        holds: how many stand.
    """

    key: bytes
    group: int
    offset: int
    size: int
    holds: int = 0


class SlotTable:
    """The account of an arena; pure bookkeeping, touches no memory. Not thread-safe.

    Attributes:
        chunk_bytes: of a chunk of every group.
        slabs: the slots.
        filling, ready: chunks of these states, by key. To look at, not to change.
    """

    def __init__(self, capacity_bytes: int, chunk_bytes: Sequence[int]) -> None:
        """All free.

        Args:
            capacity_bytes: of the arena.
            chunk_bytes: of a chunk of every group, whole pages.

        Raises:
            GeometryError: chunks are not whole pages.
            ConfigError: the arena is too small for them.
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
        """FREE to FILLING, for a key that is in neither `filling` nor `ready`; None if no slot is free."""
        size = self.chunk_bytes[group]
        offset = self.slabs.take(size)
        if offset is None:
            return None
        chunk = ResidentChunk(key, group, offset, size)
        self.filling[key] = self._slots[offset] = chunk
        return self._hold(chunk, self._fills)

    def commit(self, slot: Slot) -> bool:
        """FILLING to READY, or EVICTED to FREE; whether it is READY. Raises KeyError without this hold."""
        wanted = self.filling.get(slot.key) is self._fills[slot.serial]
        if wanted:
            self.ready[slot.key] = self.filling.pop(slot.key)
        self._let_go(slot, self._fills)
        return wanted

    def abort(self, slot: Slot) -> bool:
        """FILLING or EVICTED to FREE; whether it was FILLING. Raises KeyError without this hold."""
        wanted = self.filling.get(slot.key) is self._fills[slot.serial]
        if wanted:
            del self.filling[slot.key]
        self._let_go(slot, self._fills)
        return wanted

    def open(self, key: bytes) -> Slot:
        """Hold a READY chunk for reading. Raises KeyError if there is none of this key."""
        return self._hold(self.ready[key], self._reads)

    def close(self, slot: Slot) -> bool:
        """Give a read's hold back; whether a READY chunk lost its last. Raises KeyError without this hold."""
        chunk = self._let_go(slot, self._reads)
        return self._is_ready(chunk) and not chunk.holds

    def evict(self, key: bytes) -> ResidentChunk:
        """READY to FREE, or to EVICTED while it is read. Raises KeyError if there is none of this key."""
        chunk = self.ready.pop(key)
        self._free_if_over(chunk)
        return chunk

    def clear(self) -> int:
        """FILLING and READY to EVICTED, or FREE; returns how many were FILLING."""
        for key in list(self.ready):
            self.evict(key)
        unfilled = len(self.filling)
        self.filling.clear()
        return unfilled

    def crowding(self, group: int) -> list[bytes]:
        """Keys to evict so that a whole slab of another size is free for this group; empty if there is none.

        A slab is offered when free slots of its size come to a slab, and nobody holds anything in it.
        """
        for slab in self.slabs.crowding(self.chunk_bytes[group]):
            chunks = [self._slots[at] for at in self.slabs.slots(slab) if at in self._slots]
            if not any(chunk.holds for chunk in chunks):
                return [chunk.key for chunk in chunks]
        return []

    def check_integrity(self) -> None:
        """Compare the books with themselves; changes nothing, takes time with the number of chunks.

        Raises:
            AssertionError: they contradict each other; the message says where.
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
        """Whether this chunk is, not a later one of its key."""
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
        """EVICTED to FREE, once nobody holds it."""
        if not chunk.holds and not self._is_ready(chunk):
            del self._slots[chunk.offset]
            self.slabs.give(chunk.offset)
