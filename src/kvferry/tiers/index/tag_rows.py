"""The rows of a key table. Each row is a cache line with tags, and with one bit for each tag and tier."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

MAX_TIERS = 8
ALL_TIERS = (1 << MAX_TIERS) - 1
Tags: TypeAlias = npt.NDArray[np.uint64]
TierBits: TypeAlias = npt.NDArray[np.int64]

_SLOTS = 7
_ROW = _SLOTS + 1
_LINE_BYTES = 64
_LAST_BYTE = 56
# The tags of one chunk's groups differ in the last byte only. This puts them into distant rows.
_SPREAD = 0x9E3779B1
_EVERY = 0x01010101010101  # once in the byte of every slot
_OVERFLOW = 1 << _LAST_BYTE
_BYTE, _LAST, _BITS = np.uint64(ALL_TIERS), np.uint64(_LAST_BYTE), np.uint64(_OVERFLOW - 1)
_SUM = np.uint64(_EVERY << 8)  # a word times this has the sum of its other bytes in its last byte


class TagRows:
    """A hash table of fixed size for tags, in rows with 7 slots, all free at first.

    Not thread-safe, but `tier_bits` may run during a change.

    A row has 8 words of 8 bytes::

        tag  tag  tag  tag  tag  tag  tag | bits
                                            one byte per slot, one bit per tier
                                            last byte: 1 if a tag of this row did not fit, else 0

    A slot whose bits are all 0 is free, whatever tag is in it.

    Args:
        count: number of rows, a power of 2.

    Attributes:
        overflow: tier bits of each tag that did not fit into its row.
    """

    def __init__(self, count: int) -> None:
        # One row more, to begin at a cache line: a look-up of a row then causes one cache miss.
        memory = np.zeros((count + 1) * _ROW, np.uint64)
        begin = -memory.ctypes.data % _LINE_BYTES // memory.itemsize
        self._table = memory[begin : begin + count * _ROW].reshape(count, _ROW)
        self._words = self._table.reshape(-1).data
        self._mask = np.uint64(count - 1)
        self.overflow: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._table)

    def tier_bits(self, tags: Tags) -> TierBits:
        # All row indices are in range. With ``mode="clip"`` numpy saves the check.
        rows = self._table.take((_rows_of(tags) & self._mask).view(np.int64), axis=0, mode="clip")
        bits = rows[:, _SLOTS]
        # The eight comparisons of a row as one word of bytes 0 and 1.
        same = (rows == tags[:, None]).view(np.uint64)[:, 0]
        found: TierBits = ((same * _BYTE & bits) * _SUM >> _LAST).view(np.int64)
        over = (bits >> _LAST).nonzero()[0]
        for at, tag in zip(over.tolist(), tags[over].tolist(), strict=True):
            found[at] |= self.overflow.get(tag, 0)
        return found

    def update(self, tag: int, *, keep: int, add: int) -> tuple[int, int]:
        """Set the bits of a tag to ``(bits & keep) | add``. Return the bits before and after."""
        first = (row_of(tag) & len(self) - 1) * _ROW
        last = first + _SLOTS
        tags, bits = self._words[first:last].tolist(), self._words[last]
        if bits >= _OVERFLOW and tag in self.overflow:
            before = self.overflow[tag]
            if after := before & keep | add:
                # Replace the bits in one step, because readers take no lock.
                self.overflow[tag] = after
            else:
                del self.overflow[tag]
            return before, after
        if tag in tags:
            slot = tags.index(tag)
            before = bits >> 8 * slot & ALL_TIERS
            after = before & keep | add
            self._words[last] = bits ^ (before ^ after) << 8 * slot
            return before, after
        if add:
            free = bits.to_bytes(_ROW, "little").find(0, 0, _SLOTS)
            if free < 0:
                self.overflow[tag] = add
                self._words[last] = bits | _OVERFLOW
            else:
                # The tag first: a reader that sees its bits must not match the tag that was there before.
                self._words[first + free] = tag
                self._words[last] = bits | add << 8 * free
        return 0, add

    def copy_rows(self, smaller: TagRows, first: int, last: int) -> None:
        """Copy rows `first` to `last` (excluded) from a table of half as many rows, without overflow."""
        half = len(smaller)
        old = smaller._table[first:last]
        # A row of the smaller table becomes two rows here. One bit of the hash says which of them a tag goes
        # to.
        higher = np.zeros(old.shape, np.uint8)
        higher[:, :_SLOTS] = np.where(_rows_of(old[:, :_SLOTS]) & np.uint64(half), ALL_TIERS, 0)
        bits = old[:, _SLOTS] & _BITS
        upper = bits & higher.view(np.uint64)[:, 0]
        for at, those in ((first, bits ^ upper), (half + first, upper)):
            rows = self._table[at : at + len(old)]
            rows[:, :_SLOTS], rows[:, _SLOTS] = old[:, :_SLOTS], those

    def clear(self, bit: int) -> None:
        self._table[:, _SLOTS] &= ~np.uint64(bit * _EVERY)
        self.overflow = {tag: left for tag, bits in self.overflow.items() if (left := bits & ~bit)}

    def count(self, mask: int) -> int:
        bits = (self._table[:, _SLOTS] & np.uint64(mask * _EVERY)).view(np.uint8)
        return int(np.count_nonzero(bits)) + sum(1 for bits in self.overflow.values() if bits & mask)


def row_of(tag: int) -> int:
    """Return a hash of a tag. The tag's row is the hash modulo the row count."""
    return tag + (tag >> _LAST_BYTE) * _SPREAD


def _rows_of(tags: Tags) -> Tags:
    """Return `row_of` of each tag, modulo 2^64."""
    return tags + (tags >> _LAST) * np.uint64(_SPREAD)
