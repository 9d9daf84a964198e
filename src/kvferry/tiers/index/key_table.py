"""Which keys are in which places, for who asks for thousands at once: by *tags*, their last eight bytes.

A set of Python's is asked for one key after another and waits for memory at each: among a million keys a
third of a microsecond, several times what a table of numpy takes that is asked for all. Keys are digests, so
tags tell them apart but for accidents, one in 2^56 pairs of a group: a chunk is thought to be there then that
is not, which its fetch finds, since that goes by the whole key.

All places of a cache share a table, so that one look-up answers for all. A tag has its slot in the row that
some of its bits name, and a row is as long as a line of the processor's cache:

    tag  tag  tag  tag  tag  tag  tag | marks
                                        a byte for every slot, a bit of it for every place
                                        the last byte: tags of this row have not all found a slot

Rows hold two tags in the mean at most, so hardly one ever runs over; what finds no slot is in a dict. A table
that fills up is moved to one of twice the rows, a piece with every key that is added: nobody waits for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TAG_BYTES = 8
MAX_TIERS = 8
Uint64s: TypeAlias = npt.NDArray[np.uint64]
TierBits: TypeAlias = npt.NDArray[np.int64]

_SLOTS = 7
_ROW = _SLOTS + 1
_LINE_BYTES = 64
_MOST = 2  # tags of a row, in the mean
_FEWEST = 1 << 7
_PIECE = 1 << 8
_LAST_BYTE = 56
_APART = 0x9E3779B1  # of one chunk's groups, which differ in the last byte alone
_ALL = (1 << MAX_TIERS) - 1
_EVERY = 0x01010101010101  # once in the byte of every slot
_OVER = 1 << _LAST_BYTE
_BYTE, _LAST, _MARKS = np.uint64(_ALL), np.uint64(_LAST_BYTE), np.uint64(_OVER - 1)
_SUM = np.uint64(_EVERY << 8)  # a word times this has the sum of its other bytes in its last


def tags_of(keys: Sequence[bytes]) -> Uint64s:
    """Of keys of at least `TAG_BYTES`: uint64 of shape (len(keys),)."""
    return np.frombuffer(b"".join([key[-TAG_BYTES:] for key in keys]), "<u8")


class KeyTable:
    """The keys of up to `MAX_TIERS` places. Any thread may use it; who asks waits for nobody.

    An answer that crosses a change is of before or after it, or, where a slot changes hands, of the other
    tag: the fetch finds that too.
    """

    def __init__(self) -> None:
        self._rows = self._next = _TagRows(_FEWEST)
        self._moved = 0  # rows that have been moved to `_next`, if the table grows
        self._count = self._places = 0
        self._lock = Lock()

    def __len__(self) -> int:
        """Keys that are in any place."""
        return self._count

    def marks(self, tags: Uint64s) -> TierBits:
        """Where each is: int64 of the shape of `tags`, (n,): the bits (`TierKeys.bit`) of all its places."""
        return self._rows.marks(tags)

    def join(self) -> int:
        """The bit of one more place.

        Raises:
            ValueError: it has `MAX_TIERS`.
        """
        if self._places == MAX_TIERS:
            raise ValueError(f"a table of tags has {MAX_TIERS} places at most")
        self._places += 1
        return 1 << self._places - 1

    def change(self, tag: int, keep: int, put: int) -> None:
        """Of its places, some are kept and others added: bits of both."""
        with self._lock:
            before, after = self._rows.change(tag, keep, put)
            self._count += (after > 0) - (before > 0)
            if _row(tag) & len(self._rows) - 1 < self._moved:
                self._next.change(tag, keep, put)
            if put and self._count > _MOST * len(self._rows):
                self._grow()

    def clear(self, bit: int) -> None:
        """None is in this place. Takes time with the size of the table."""
        with self._lock:
            for rows in {self._rows, self._next}:
                rows.clear(bit)
            self._count = self._rows.count(_ALL)

    def count(self, bit: int) -> int:
        """Keys that are in this place. Takes time with the size of the table."""
        with self._lock:
            return self._rows.count(bit)

    def _grow(self) -> None:
        """Move a piece to twice as many rows; both are kept up to date until all has been moved."""
        if self._next is self._rows:
            self._next = _TagRows(2 * len(self._rows))
        self._next.take(self._rows, self._moved, self._moved + _PIECE)
        self._moved += _PIECE
        if self._moved >= len(self._rows):
            for tag, marks in self._rows.over.items():
                self._next.change(tag, 0, marks)
            self._rows, self._moved = self._next, 0


class TierKeys:
    """The keys of one place, in a table that it may share with others. Any thread may use it.

    >>> here, gone = bytes(31) + b"a", bytes(31) + b"b"
    >>> tags = Tags()
    >>> tags.add(here)
    >>> tags.known(tags_of([here, gone]))
    array([ True, False])

    Attributes:
        table: which.
        bit: of the place, in the table's marks.
    """

    def __init__(self, table: KeyTable | None = None) -> None:
        """Empty, in a table of its own if none is given."""
        self.table = KeyTable() if table is None else table
        self.bit = self.table.join()

    def __len__(self) -> int:
        """Takes time with the size of the table."""
        return self.table.count(self.bit)

    def known(self, tags: Uint64s) -> npt.NDArray[np.bool_]:
        """Which are there: bool of the shape of `tags`, (n,)."""
        found: npt.NDArray[np.bool_] = (self.table.marks(tags) & self.bit) != 0
        return found

    def add(self, key: bytes) -> None:
        """It is there."""
        self.table.change(_tag(key), _ALL, self.bit)

    def discard(self, key: bytes) -> None:
        """It is not there."""
        self.table.change(_tag(key), _ALL ^ self.bit, 0)

    def clear(self) -> None:
        """None is there. Takes time with the size of the table."""
        self.table.clear(self.bit)


class _TagRows:
    """See the module. Not thread-safe, but for `marks`.

    A slot whose marks are 0 is free, whatever tag it has.

    Attributes:
        over: marks of tags that have found no slot.
    """

    def __init__(self, count: int) -> None:
        """So many, a power of 2, all free."""
        memory = np.zeros((count + 1) * _ROW, np.uint64)
        begin = -memory.ctypes.data % _LINE_BYTES // memory.itemsize
        self._table = memory[begin : begin + count * _ROW].reshape(count, _ROW)
        self._words = self._table.reshape(-1).data
        self._mask = np.uint64(count - 1)
        self.over: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._table)

    def marks(self, tags: Uint64s) -> TierBits:
        """See `KeyTable.marks`."""
        # None is outside of the table: given a mode, numpy does not look.
        rows = self._table.take((_rows(tags) & self._mask).view(np.int64), axis=0, mode="clip")
        marks = rows[:, _SLOTS]
        same = (rows == tags[:, None]).view(np.uint64)[:, 0]
        found: TierBits = ((same * _BYTE & marks) * _SUM >> _LAST).view(np.int64)
        over = (marks >> _LAST).nonzero()[0]
        for at, tag in zip(over.tolist(), tags[over].tolist(), strict=True):
            found[at] |= self.over.get(tag, 0)
        return found

    def change(self, tag: int, keep: int, put: int) -> tuple[int, int]:
        """See `KeyTable.change`; returns the marks before and after."""
        first = (_row(tag) & len(self) - 1) * _ROW
        last = first + _SLOTS
        tags, marks = self._words[first:last].tolist(), self._words[last]
        if marks >= _OVER and tag in self.over:
            before = self.over[tag]
            if after := before & keep | put:
                self.over[tag] = after  # never gone in between: who asks takes no lock
            else:
                del self.over[tag]
            return before, after
        if tag in tags:
            slot = tags.index(tag)
            before = marks >> 8 * slot & _ALL
            after = before & keep | put
            self._words[last] = marks ^ (before ^ after) << 8 * slot
            return before, after
        if put:
            free = marks.to_bytes(_ROW, "little").find(0, 0, _SLOTS)
            if free < 0:
                self.over[tag] = put
                self._words[last] = marks | _OVER
            else:
                self._words[first + free] = tag
                self._words[last] = marks | put << 8 * free
        return 0, put

    def take(self, other: _TagRows, first: int, last: int) -> None:
        """What is in some rows of half as many, by one bit more of each tag; `over` is left out."""
        half = len(other)
        old = other._table[first:last]
        higher = np.zeros(old.shape, np.uint8)
        higher[:, :_SLOTS] = np.where(_rows(old[:, :_SLOTS]) & np.uint64(half), _ALL, 0)
        marks = old[:, _SLOTS] & _MARKS
        mine = marks & higher.view(np.uint64)[:, 0]
        for at, those in ((first, marks ^ mine), (half + first, mine)):
            rows = self._table[at : at + len(old)]
            rows[:, :_SLOTS], rows[:, _SLOTS] = old[:, :_SLOTS], those

    def clear(self, bit: int) -> None:
        """See `KeyTable.clear`."""
        self._table[:, _SLOTS] &= ~np.uint64(bit * _EVERY)
        self.over = {tag: left for tag, marks in self.over.items() if (left := marks & ~bit)}

    def count(self, bits: int) -> int:
        """Tags with any of these bits."""
        marks = (self._table[:, _SLOTS] & np.uint64(bits * _EVERY)).view(np.uint8)
        return int(np.count_nonzero(marks)) + sum(1 for marks in self.over.values() if marks & bits)


def _tag(key: bytes) -> int:
    return int.from_bytes(key[-TAG_BYTES:], "little")


def _row(tag: int) -> int:
    """Its lowest bits name the row; those of a key's groups lie apart."""
    return tag + (tag >> _LAST_BYTE) * _APART


def _rows(tags: Uint64s) -> Uint64s:
    """`_row` of each, modulo 2^64."""
    return tags + (tags >> _LAST) * np.uint64(_APART)
