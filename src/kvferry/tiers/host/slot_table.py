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

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """A hold on a slot (memory of one chunk), which prevents reuse of the memory.

    The owner of the hold may read or fill the slot until it releases the hold.

    Attributes:
        key: key of the chunk.
        group: index of the KV cache group.
        offset: byte offset of the slot in the arena (host memory that holds the chunks), a multiple of 4096.
        serial: number that identifies the hold, unique in the table.
    """

    key: bytes
    group: int
    offset: int
    serial: int


@dataclass(slots=True)
class ResidentChunk:
    """A chunk that occupies a slot of the arena (host memory that holds the chunks).

    `SlotTable.filling` or `SlotTable.ready` contains the chunk, unless it is evicted and still held.

    Attributes:
        key: key of the chunk.
        group: index of the KV cache group.
        offset: offset of the slot in the arena, in bytes.
        size: bytes of the slot.
        holds: number of holds on the slot.
    """

    key: bytes
    group: int
    offset: int
    size: int
    holds: int = 0


class SlotTable:
    """A table of the states of all slots (memory of one chunk each) of an arena. Not thread-safe.

    A slot is FREE, FILLING (being filled), READY (readable) or EVICTED (no longer readable, but still held by
    a read or a fill). The table does not access the arena's memory.

    Attributes:
        chunk_bytes: bytes of a chunk, for each KV cache group.
        slabs: allocator of the slots.
        filling, ready: chunks whose slots are in the state FILLING or READY, by key. Callers must not change
            these dictionaries.
    """

    def __init__(self, capacity_bytes: int, chunk_bytes: Sequence[int]) -> None:
        """Create a table of slots (memory of one chunk each) that are all FREE.

        Args:
            capacity_bytes: bytes of the arena (host memory that holds the chunks).
            chunk_bytes: bytes of a chunk, for each KV cache group; multiples of 4096.

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

    @property
    def holds(self) -> int:
        """Number of holds of fills and reads that are not released yet."""
        return len(self._fills) + len(self._reads)

    def reserve(self, key: bytes, group: int) -> Slot | None:
        """Allocate a slot for a chunk that will be filled, and return a hold on the slot.

        The state of the slot changes from FREE to FILLING. Return None if no slot of the group's size is
        free.

        Args:
            key: key of the chunk. No slot that is FILLING (being filled) or READY (readable) may have this
                key.
            group: index of the KV cache group.
        """
        size = self.chunk_bytes[group]
        offset = self.slabs.take(size)
        if offset is None:
            return None
        chunk = ResidentChunk(key, group, offset, size)
        self.filling[key] = self._slots[offset] = chunk
        return self._hold(chunk, self._fills)

    def commit(self, slot: Slot) -> bool:
        """Make a filled chunk readable, and release the hold that `reserve` returned.

        The state of the slot changes from FILLING to READY. If `clear` has evicted the chunk meanwhile, the
        slot is freed instead.

        Args:
            slot: hold to release.

        Returns:
            Whether the chunk is READY now.

        Raises:
            KeyError: the hold was released before.
        """
        wanted = self.filling.get(slot.key) is self._fills[slot.serial]
        if wanted:
            self.ready[slot.key] = self.filling.pop(slot.key)
        self._release_hold(slot, self._fills)
        return wanted

    def abort(self, slot: Slot) -> bool:
        """Free the slot of a chunk that could not be filled, and release the hold that `reserve` returned.

        Args:
            slot: hold to release.

        Returns:
            Whether the slot was FILLING (being filled); False if `clear` has evicted the chunk since.

        Raises:
            KeyError: the hold was released before.
        """
        wanted = self.filling.get(slot.key) is self._fills[slot.serial]
        if wanted:
            del self.filling[slot.key]
        self._release_hold(slot, self._fills)
        return wanted

    def open(self, key: bytes) -> Slot:
        """Return a new hold on a READY (readable) chunk.

        While the hold exists, the memory of the chunk is not reused.

        Raises:
            KeyError: no READY chunk has this key.
        """
        return self._hold(self.ready[key], self._reads)

    def close(self, slot: Slot) -> bool:
        """Release a hold that `open` returned. If the chunk was evicted and has no other hold, free its slot.

        Args:
            slot: hold to release.

        Returns:
            Whether the chunk is still READY (readable) and has no other hold.

        Raises:
            KeyError: the hold was released before.
        """
        chunk = self._release_hold(slot, self._reads)
        return self._is_ready(chunk) and not chunk.holds

    def evict(self, key: bytes) -> ResidentChunk:
        """Evict a READY (readable) chunk and return it.

        If no read holds the slot of the chunk, the slot becomes FREE. Otherwise its state is EVICTED until
        the last read ends. Then it becomes FREE.

        Raises:
            KeyError: no READY chunk has this key.
        """
        chunk = self.ready.pop(key)
        self._free_if_unused(chunk)
        return chunk

    def clear(self) -> int:
        """Evict all chunks, including those that are being filled. Return the number of chunks being filled.

        A slot without holds becomes FREE. If a read or a fill has a hold on a slot, the slot is EVICTED until
        the last hold is released. Then it becomes FREE.
        """
        for key in list(self.ready):
            self.evict(key)
        unfilled = len(self.filling)
        self.filling.clear()
        return unfilled

    def keys_to_reclaim(self, group: int) -> list[bytes]:
        """Choose a slab (part of the arena with slots of one size) to empty, and return its chunks' keys.

        The caller evicts these chunks. Then the slab can be divided into slots of another size.

        The chosen slab has slots of another size than the group's chunks. At least one slot of the slab is
        free, and none is held. The free slots of that size in all slabs add up to at least one slab.

        Args:
            group: index of the KV cache group that needs a slot.

        Returns:
            The keys; an empty list if no slab meets these conditions.
        """
        for slab in self.slabs.reclaimable(self.chunk_bytes[group]):
            chunks = [self._slots[at] for at in self.slabs.slots(slab) if at in self._slots]
            if not any(chunk.holds for chunk in chunks):
                return [chunk.key for chunk in chunks]
        return []

    def check_integrity(self) -> None:
        """Check that `filling`, `ready`, the holds and the allocator `slabs` agree about every slot.

        The time is proportional to the number of chunks.

        Raises:
            AssertionError: two of them disagree; the message describes how.
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
        """Return whether `ready` contains this chunk, and not another chunk with the same key."""
        return self.ready.get(chunk.key) is chunk

    def _hold(self, chunk: ResidentChunk, holds: dict[int, ResidentChunk]) -> Slot:
        """Create a hold on a chunk, record it in `holds`, and return it.

        Args:
            chunk: chunk to hold.
            holds: dictionary of held chunks by `Slot.serial`: `_fills` if the hold is for filling the chunk,
                `_reads` if it is for reading.
        """
        serial = next(self._serials)
        holds[serial] = chunk
        chunk.holds += 1
        return Slot(chunk.key, chunk.group, chunk.offset, serial)

    def _release_hold(self, slot: Slot, holds: dict[int, ResidentChunk]) -> ResidentChunk:
        """Release a hold on a chunk, and return the chunk. Free its slot if the slot is no longer in use.

        Args:
            slot: hold to release.
            holds: dictionary of held chunks by `Slot.serial`: `_fills` if the hold is for filling the chunk,
                `_reads` if it is for reading.

        Raises:
            KeyError: the hold was released before.
        """
        chunk = holds.pop(slot.serial)
        chunk.holds -= 1
        self._free_if_unused(chunk)
        return chunk

    def _free_if_unused(self, chunk: ResidentChunk) -> None:
        """Free the slot of a chunk if the chunk is evicted and no read or fill holds the slot any more."""
        if not chunk.holds and not self._is_ready(chunk):
            del self._slots[chunk.offset]
            self.slabs.free(chunk.offset)
