"""The keys of the chunks that tiers have: a hash table for batched membership tests over all tiers.

An engine step looks up thousands of keys at once. A Python set looks up the keys one after another, and each
causes a CPU cache miss: a third of a microsecond among a million keys. A numpy table that looks up all keys
in one call is several times as fast. It stores *tags*, the last eight bytes of keys, in rows of one cache
line (`TagRows`).

Keys are digests, so two keys of a group have equal tags with a probability of 2^-56. Then the look-up reports
a chunk that is absent. Its fetch uses the whole key, and misses.

The tiers of a cache share one table, so one look-up answers for all of them. `TierKeys` are the keys of one
tier. `ListedKeys` also keeps the keys themselves, of a tier whose storage other processes change.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

# A key's part is its first byte.
PARTS = 256
_ALL_PARTS = range(PARTS)

MAX_TIERS = 8
ALL_TIERS = (1 << MAX_TIERS) - 1
Tags: TypeAlias = npt.NDArray[np.uint64]
TierBits: TypeAlias = npt.NDArray[np.int64]

TAG_BYTES = 8

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

_TAGS_PER_ROW = 2  # on average
_FIRST_ROWS = 1 << 7
_ROWS_PER_STEP = 1 << 8


def tag_of(key: bytes) -> int:
    """Return the tag of a key: its last `TAG_BYTES` bytes as an integer."""
    return int.from_bytes(key[-TAG_BYTES:], "little")


def tags_of(keys: Sequence[bytes]) -> Tags:
    """Return the tags of keys: uint64 of shape (len(keys),). Each key has `TAG_BYTES` bytes or more."""
    return np.frombuffer(b"".join([key[-TAG_BYTES:] for key in keys]), "<u8")


class TagRows:
    """A hash table of fixed size for tags, in rows with 7 slots, all free at first.

    Not thread-safe, but `tier_bits` may run during a change.

    A row has 8 words of 8 bytes::

        tag  tag  tag  tag  tag  tag  tag | bits
                                            one byte per slot, one bit per tier
                                            last byte: 1 if a tag of this row did not fit, else 0

    A slot whose bits are all 0 is free, whatever tag is in it.

    Attributes:
        rows: number of rows, a power of 2.
        overflow: tier bits of each tag that did not fit into its row.
    """

    def __init__(self, count: int) -> None:
        # One row more, to begin at a cache line: a look-up of a row then causes one
        # cache miss.
        memory = np.zeros((count + 1) * _ROW, np.uint64)
        begin = -memory.ctypes.data % _LINE_BYTES // memory.itemsize
        self._table = memory[begin : begin + count * _ROW].reshape(count, _ROW)
        self._words = self._table.reshape(-1).data
        self.rows = count
        self._mask = np.uint64(count - 1)
        self.overflow: dict[int, int] = {}

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
        first = (_row_of(tag) & self.rows - 1) * _ROW
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
        half = smaller.rows
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


def _row_of(tag: int) -> int:
    """Return a hash of a tag, which is in the row of this number modulo the row count."""
    return tag + (tag >> _LAST_BYTE) * _SPREAD


def _rows_of(tags: Tags) -> Tags:
    return tags + (tags >> _LAST) * np.uint64(_SPREAD)


@dataclass(slots=True)
class _TableWatch:
    """The chunks whose tiers have changed. Any thread adds to it; the watcher takes from it."""

    tags: Container[int]  # tags of the watched chunks. The watcher may change them at any time.
    # Tags of watched chunks that a tier has gained or lost, oldest change first.
    changed: deque[int] = field(default_factory=deque)
    cleared: bool = False  # True if all chunks of a tier were removed at once. The watcher sets it back.


class KeyTable:
    """A table that records which tiers have which chunks: a bit for each tag and tier.

    Any thread may use the table. Look-ups take no lock, so a look-up during a change sees the state before or
    after the change. In rare cases, another tag takes over the slot of the requested tag meanwhile: the
    look-up returns the tiers of that tag's chunk, and a fetch from them misses.

    Args:
        first_rows: number of rows at the start, a power of 2.
        rows_per_step: number of rows that each added key moves while the table grows.
    """

    def __init__(self, first_rows: int = _FIRST_ROWS, rows_per_step: int = _ROWS_PER_STEP) -> None:
        self._rows = self._next = TagRows(first_rows)
        self._rows_per_step = rows_per_step
        self._moved = 0  # number of rows that have been moved to `_next` while the table grows
        self._count = self._tiers = 0
        self._lock = Lock()
        self._watch: _TableWatch | None = None

    def __len__(self) -> int:
        """Return the number of chunks that at least one tier has."""
        return self._count

    def tier_bits(self, tags: Tags) -> TierBits:
        """Return the bits of the tiers that have each chunk: int64 of shape (len(tags),), 0 for none."""
        return self._rows.tier_bits(tags)

    def add_tier(self) -> int:
        """Add a tier; return its bit, a power of 2."""
        if self._tiers == MAX_TIERS:
            raise ValueError(f"a key table has {MAX_TIERS} tiers already; use another table")
        self._tiers += 1
        return 1 << self._tiers - 1

    def update(self, tag: int, *, keep: int = ALL_TIERS, add: int = 0) -> int:
        """Set the tier bits of a chunk to ``(bits & keep) | add``, and return those before the change."""
        with self._lock:
            before, after = self._rows.update(tag, keep=keep, add=add)
            self._count += (after > 0) - (before > 0)
            # Until the larger table replaces this one, look-ups use this one, and moved rows change in both.
            if self._moved and _row_of(tag) & self._rows.rows - 1 < self._moved:
                self._next.update(tag, keep=keep, add=add)
            # At two tags per row on average, few of the seven slots of a row overflow. No caller waits for
            # all rows to move.
            if add and self._count > _TAGS_PER_ROW * self._rows.rows:
                self._grow()
            if self._watch is not None and before != after and tag in self._watch.tags:
                self._watch.changed.append(tag)
            return before

    def clear(self, bit: int) -> None:
        """Remove all keys of a tier. The time is proportional to the size of the table."""
        with self._lock:
            for rows in {self._rows, self._next}:
                rows.clear(bit)
            self._count = self._rows.count(ALL_TIERS)
            if self._watch is not None:
                self._watch.cleared = True

    def watch(self, tags: Container[int]) -> _TableWatch:
        """Record which chunks tiers gain or lose. A table has one watch, and a later one replaces it."""
        self._watch = _TableWatch(tags)
        return self._watch

    def count(self, bit: int) -> int:
        with self._lock:
            return self._rows.count(bit)

    def _grow(self) -> None:
        """Move the next few rows to a table of twice the size, which finally replaces this one."""
        if self._next is self._rows:
            self._next = TagRows(2 * self._rows.rows)
        self._next.copy_rows(self._rows, self._moved, self._moved + self._rows_per_step)
        self._moved += self._rows_per_step
        if self._moved >= self._rows.rows:
            for tag, bits in self._rows.overflow.items():
                self._next.update(tag, keep=0, add=bits)
            self._rows, self._moved = self._next, 0


class RecentlyEvicted:
    """A set of at most 131072 recently evicted keys, in 1 MiB of memory. Thread-safe.

    >>> evicted = RecentlyEvicted()
    >>> evicted.add(bytes(range(32)))
    >>> bytes(range(32)) in evicted, bytes(32) in evicted
    (True, False)
    """

    def __init__(self, slots: int = 1 << 17) -> None:
        self._marks = memoryview(bytearray(8 * slots)).cast("Q")

    def __contains__(self, key: bytes) -> bool:
        slot, mark = self._slot_and_mark(key)
        return self._marks[slot] == mark

    def add(self, key: bytes) -> None:
        """Add the key of an evicted chunk, 12 bytes or more."""
        slot, mark = self._slot_and_mark(key)
        self._marks[slot] = mark

    def _slot_and_mark(self, key: bytes) -> tuple[int, int]:
        # The slot has 63 bits of the key. Two keys of one slot are confused with a probability of 2^-63.
        # The last byte is the index of the group. All groups of a chunk have the same bytes before it.
        slot = (int.from_bytes(key[:4], "big") + 0x9E37 * key[-1]) % len(self._marks)
        # Never 0, which means an empty slot.
        return slot, int.from_bytes(key[4:12], "big") | 1


class TierKeys:
    """A set of the keys of one tier's chunks, in a table that several tiers may share. Thread-safe.

    >>> key = bytes(31) + b"a"
    >>> keys = TierKeys()
    >>> keys.add(key)
    >>> keys.contains(tags_of([key, bytes(32)])), key in keys.recently_evicted
    (array([ True, False]), False)
    >>> keys.discard(key)
    >>> keys.contains(tags_of([key])), key in keys.recently_evicted
    (array([False]), True)

    Attributes:
        bit: bit of the tier in the result of `KeyTable.tier_bits`.
        recently_evicted: keys of chunks that left the tier recently. They may have come back.
    """

    def __init__(self, table: KeyTable | None = None) -> None:
        self.table = KeyTable() if table is None else table
        self.bit = self.table.add_tier()
        self.recently_evicted = RecentlyEvicted()

    def __len__(self) -> int:
        return self.table.count(self.bit)

    def contains(self, tags: Tags) -> npt.NDArray[np.bool_]:
        """Return a mask of the chunks that the tier has: bool of shape (len(tags),)."""
        found: npt.NDArray[np.bool_] = (self.table.tier_bits(tags) & self.bit) != 0
        return found

    def add(self, key: bytes) -> None:
        self.table.update(tag_of(key), add=self.bit)

    def discard(self, key: bytes) -> None:
        """Remove a key, and remember it as recently evicted. Do nothing if the tier does not have it."""
        if self.table.update(tag_of(key), keep=ALL_TIERS ^ self.bit) & self.bit:
            self.recently_evicted.add(key)

    def clear(self) -> None:
        """Remove all keys, and forget evicted ones. The time is proportional to the size of the table."""
        self.table.clear(self.bit)
        self.recently_evicted = RecentlyEvicted()


class ListedKeys:
    """The keys of the chunks that a tier is known to have, kept up to date by listings.

    A listing takes time, so what this process adds or removes meanwhile takes precedence over it. Any thread
    may use the object, but two listings that run at the same time must not include the same part. `keys` gets
    every change. Listings add no keys beyond `max_keys`, but `add` does. `changes` counts those of listings.
    """

    def __init__(self, keys: TierKeys, max_keys: int = sys.maxsize) -> None:
        self.changes = 0
        self._tier = keys
        self._max_keys = max_keys
        self._lock = Lock()
        # For each part, the number of the listing that last showed each key. For a key that was added, the
        # number of the latest listing at that time.
        self._keys: list[dict[bytes, int]] = [{} for _ in _ALL_PARTS]
        self._listings = [0] * PARTS
        # For each part that is being listed, the keys discarded since then. The listing may still show them.
        self._discarded: dict[int, set[bytes]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys[key[0]]

    def add(self, key: bytes) -> None:
        with self._lock:
            self._keys[key[0]][key] = self._listings[key[0]]
            self._tier.add(key)

    def discard(self, key: bytes) -> None:
        """Remove the key of a chunk that was evicted, or that could not be fetched."""
        with self._lock:
            if key[0] in self._discarded:
                self._discarded[key[0]].add(key)
            if self._keys[key[0]].pop(key, None) is not None:
                self._tier.discard(key)

    @contextmanager
    def listing(self, parts: Sequence[int] = _ALL_PARTS) -> Iterator[None]:
        """List parts of the storage: call `add_page` with every page in the ``with`` statement.

        When it ends without an exception, known keys of these parts that were on no page are removed.
        """
        with self._lock:
            for part in parts:
                self._listings[part] += 1
                self._discarded[part] = set()
        try:
            yield
            for part in parts:
                # The lock is held for one part or page at a time, so that other threads do not wait long.
                self._remove_unlisted(part)
        finally:
            with self._lock:
                for part in parts:
                    self._discarded.pop(part, None)

    def add_page(self, page: Iterable[bytes]) -> None:
        """Add the keys of a page up to `max_keys`, except those discarded since the listing began."""
        with self._lock:
            room = self._max_keys - len(self)
            for key in page:
                known = self._keys[key[0]]
                if key in self._discarded.get(key[0], ()):
                    continue
                if key not in known:
                    if room <= 0:
                        continue
                    room -= 1
                    self.changes += 1
                    self._tier.add(key)
                known[key] = self._listings[key[0]]

    def _remove_unlisted(self, part: int) -> None:
        with self._lock:
            known, latest = self._keys[part], self._listings[part]
            missing = [key for key, listing in known.items() if listing < latest]
            self.changes += len(missing)
            for key in missing:
                del known[key]
                self._tier.discard(key)
