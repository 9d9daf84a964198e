"""The states of the slots of an arena, and the holds that protect slots while they are read or written.

A chunk occupies one slot, which has these states:

    FREE ─reserve→ FILLING ─filled→ READY ─evict without reads→ FREE
                      │               └─evict during a read→ EVICTED ─last close→ FREE
                      ├─not filled→ FREE
                      └─clear→ EVICTED ─end of the fill→ FREE

Only a READY chunk can be opened by its key. A *hold* keeps a slot from being reused: the fill has one hold,
and so has each read. The owner of a hold releases it when no copy or I/O is in flight, and not before, even
if the request has ended or the chunk was evicted meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count

from kvferry.common.errors import ConfigError, GeometryError

# Maximum size of a slab, as a number of the largest chunks. To empty a slab, all its chunks are evicted.
_LARGEST_PER_SLAB = 16


class Slabs:
    """An allocator of slots of a few fixed sizes (`strides`, in bytes). Not thread-safe.

    Attributes:
        count: number of slabs.
        capacity_bytes: bytes of all slabs together; the rest of the arena is not used.
        used_bytes: bytes of all allocated slots.
    """

    def __init__(self, capacity_bytes: int, strides: Collection[int]) -> None:
        kinds = sorted(set(strides))
        self.slab_bytes = _slab_bytes(capacity_bytes, kinds)
        self.count = capacity_bytes // self.slab_bytes
        if self.count < len(kinds):
            raise ConfigError(
                f"host tier: a capacity of {capacity_bytes} bytes, but chunks of {len(kinds)} sizes up to "
                f"{kinds[-1]} bytes need {len(kinds) * self.slab_bytes} or more; raise its capacity or lower "
                "the tokens of a chunk"
            )
        self.capacity_bytes = self.count * self.slab_bytes
        self.used_bytes = 0
        self._spare = list(range(self.count - 1, -1, -1))
        self._stride: dict[int, int] = {}  # of each slab in use
        self._free: dict[int, list[int]] = {}  # offsets of each slab in use
        # Slabs with free slots by stride, in order: the last opened is filled first, so that others get
        # empty.
        self._open: dict[int, dict[int, None]] = {stride: {} for stride in kinds}
        self._idle: Counter[int] = Counter()  # free slots by stride

    def has_room(self, stride: int) -> bool:
        return bool(self._open[stride] or self._spare)

    def take(self, stride: int) -> int | None:
        """Allocate a slot of `stride` bytes; return its offset in the arena, or None if there is no room."""
        if not self._open[stride]:
            if not self._spare:
                return None
            slab = self._spare.pop()
            self._stride[slab] = stride
            self._free[slab] = list(self.slots(slab))[::-1]
            self._open[stride][slab] = None
            self._idle[stride] += len(self._free[slab])
        slab = next(reversed(self._open[stride]))
        offset = self._free[slab].pop()
        if not self._free[slab]:
            del self._open[stride][slab]
        self._idle[stride] -= 1
        self.used_bytes += stride
        return offset

    def free(self, offset: int) -> None:
        """Free the slot at an offset of the arena. No code may read or write the slot afterwards."""
        slab = offset // self.slab_bytes
        stride = self._stride[slab]
        self._free[slab].append(offset)
        self._open[stride][slab] = None
        self._idle[stride] += 1
        self.used_bytes -= stride
        if len(self._free[slab]) == self.slab_bytes // stride:
            del self._stride[slab], self._open[stride][slab]
            self._idle[stride] -= len(self._free.pop(slab))
            self._spare.append(slab)

    def reclaimable(self, stride: int) -> list[int]:
        """Return the slabs that could be emptied for slots of `stride` bytes, the emptiest first.

        The free slots of their own stride add up to a slab or more.
        """
        return sorted(
            (
                slab
                for other, slabs in self._open.items()
                if other != stride and self._idle[other] * other >= self.slab_bytes
                for slab in slabs
            ),
            key=lambda slab: -len(self._free[slab]) * self._stride[slab],
        )

    def slots(self, slab: int) -> range:
        """Return the offsets of all slots of a slab, allocated or free; empty for a spare slab."""
        stride = self._stride.get(slab)
        first = slab * self.slab_bytes
        return range(first, first + self.slab_bytes // stride * stride, stride) if stride else range(0)

    def check_integrity(self) -> None:
        if sorted([*self._spare, *self._stride]) != list(range(self.count)):
            raise AssertionError("a slab is neither spare nor assigned, or both")
        idle: Counter[int] = Counter()
        taken = 0
        for slab, stride in self._stride.items():
            free, slots = self._free[slab], self.slots(slab)
            if len(set(free)) != len(free) or not set(free) < set(slots):
                raise AssertionError(f"slab {slab} has free slots {free} of {slots}")
            if bool(free) != (slab in self._open[stride]):
                raise AssertionError(f"slab {slab} has {len(free)} free slots but is not kept so")
            idle[stride] += len(free)
            taken += (len(slots) - len(free)) * stride
        if +self._idle != +idle or taken != self.used_bytes:
            raise AssertionError(
                f"{+idle} slots free, {taken} bytes taken; kept {self._idle}, {self.used_bytes}"
            )


def _slab_bytes(capacity_bytes: int, strides: Collection[int]) -> int:
    """Choose the slab size, a multiple of the largest stride, that wastes the fewest bytes."""
    largest = max(strides)
    # At least four slabs per stride, so that one stride cannot keep the arena from the others.
    most = capacity_bytes // (largest * 4 * len(strides))
    sizes = [n * largest for n in range(1, max(min(most, _LARGEST_PER_SLAB), 1) + 1)]

    # In the worst case, in which all slabs have the stride that wastes most.
    def lost(size: int) -> int:
        return max(capacity_bytes - capacity_bytes // size * (size // stride) * stride for stride in strides)

    return min(sizes, key=lambda size: (lost(size), size))


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
class _ResidentChunk:
    """A chunk that occupies a slot: FILLING, READY, or evicted and still held."""

    key: bytes
    group: int
    offset: int
    size: int
    holds: int = 0


class SlotTable:
    """The states of all slots of an arena, whose memory it does not access. Not thread-safe.

    To release a hold twice, or to open or evict a chunk that is not READY, is a KeyError.

    Attributes:
        chunk_bytes: bytes of a chunk, for each KV cache group; multiples of 4096.
        filling, ready: chunks in the state FILLING or READY, by key. Callers must not change them.
    """

    def __init__(self, capacity_bytes: int, chunk_bytes: Sequence[int]) -> None:
        if any(size < 1 or size % _PAGE_BYTES for size in chunk_bytes):
            raise GeometryError(f"chunks of {tuple(chunk_bytes)} bytes; expected multiples of {_PAGE_BYTES}")
        self.chunk_bytes = tuple(chunk_bytes)
        self.slabs = Slabs(capacity_bytes, chunk_bytes)
        self.filling: dict[bytes, _ResidentChunk] = {}
        self.ready: dict[bytes, _ResidentChunk] = {}
        self._slots: dict[int, _ResidentChunk] = {}
        self._fills: dict[int, _ResidentChunk] = {}
        self._reads: dict[int, _ResidentChunk] = {}
        self._serials = count(1)

    @property
    def holds(self) -> int:
        return len(self._fills) + len(self._reads)

    def reserve(self, key: bytes, group: int) -> Slot | None:
        """Allocate a slot for a chunk with a new key; None if no slot of the group's size is free."""
        size = self.chunk_bytes[group]
        offset = self.slabs.take(size)
        if offset is None:
            return None
        chunk = _ResidentChunk(key, group, offset, size)
        self.filling[key] = self._slots[offset] = chunk
        return self._hold(chunk, self._fills)

    def end_fill(self, slot: Slot, *, filled: bool) -> bool:
        """Make a chunk READY if it was filled, and release the hold of `reserve`.

        Returns:
            False if the chunk was cleared meanwhile.
        """
        # After `clear`, another chunk of the same key may be filled: compare the chunk, not the key.
        wanted = self.filling.get(slot.key) is self._fills[slot.serial]
        if wanted:
            chunk = self.filling.pop(slot.key)
            if filled:
                self.ready[slot.key] = chunk
        # After the change of state, which decides whether the slot is freed.
        self._release_hold(slot, self._fills)
        return wanted

    def open(self, key: bytes) -> Slot:
        """Return a new hold on a READY chunk."""
        return self._hold(self.ready[key], self._reads)

    def close(self, slot: Slot) -> bool:
        """Release a hold of `open`. Return whether the chunk is still READY and has no other hold."""
        chunk = self._release_hold(slot, self._reads)
        return self.ready.get(chunk.key) is chunk and not chunk.holds

    def evict(self, key: bytes) -> _ResidentChunk:
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

    def _hold(self, chunk: _ResidentChunk, holds: dict[int, _ResidentChunk]) -> Slot:
        serial = next(self._serials)
        holds[serial] = chunk
        chunk.holds += 1
        return Slot(chunk.key, chunk.group, chunk.offset, serial)

    def _release_hold(self, slot: Slot, holds: dict[int, _ResidentChunk]) -> _ResidentChunk:
        chunk = holds.pop(slot.serial)
        chunk.holds -= 1
        self._free_if_unused(chunk)
        return chunk

    def _free_if_unused(self, chunk: _ResidentChunk) -> None:
        # Another chunk of the same key may be ready.
        if not chunk.holds and self.ready.get(chunk.key) is not chunk:
            del self._slots[chunk.offset]
            self.slabs.free(chunk.offset)
