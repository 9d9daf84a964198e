"""A hash table for batched membership tests over all tiers of an engine.

An engine step looks up thousands of keys at once. A Python set looks up the keys one after another, and each
causes a CPU cache miss: a third of a microsecond among a million keys. A numpy table that looks up all keys
in one call is several times as fast. It stores *tags*, the last eight bytes of keys, in rows of one cache
line (`TagRows`).

Keys are digests, so two keys of a group have equal tags with a probability of 2^-56. Then the look-up reports
a chunk that is absent. Its fetch uses the whole key, and misses.

The tiers of a cache share one table, so one look-up answers for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from kvferry.tiers.index.tag_rows import ALL_TIERS, MAX_TIERS, TagRows, Tags, TierBits, row_of

__all__ = ["MAX_TIERS", "TAG_BYTES", "KeyTable", "TableWatch", "Tags", "TierBits", "tag_of", "tags_of"]

TAG_BYTES = 8

_TAGS_PER_ROW = 2  # on average
_FIRST_ROWS = 1 << 7
_ROWS_PER_STEP = 1 << 8


def tag_of(key: bytes) -> int:
    """Return the tag of a key: its last `TAG_BYTES` bytes as an integer."""
    return int.from_bytes(key[-TAG_BYTES:], "little")


def tags_of(keys: Sequence[bytes]) -> Tags:
    """Return the tags of keys: uint64 of shape (len(keys),). Each key has `TAG_BYTES` bytes or more."""
    return np.frombuffer(b"".join([key[-TAG_BYTES:] for key in keys]), "<u8")


@dataclass(slots=True)
class TableWatch:
    """The chunks whose tiers have changed. Any thread adds to it; the watcher takes from it."""

    tags: Container[int]  # tags of the watched chunks. The watcher may change them at any time.
    # Tags of watched chunks that a tier has gained or lost, oldest change first.
    changed: deque[int] = field(default_factory=deque)
    cleared: bool = False  # True if all chunks of a tier were removed at once. The watcher sets it back.


class KeyTable:
    """A table that records which tiers have which chunks: a bit for each tag and tier.

    Any thread may use the table. Look-ups take no lock, so a look-up during a change sees the state before or
    after the change. In rare cases, another tag takes over the slot of the requested tag during the look-up.
    Then the look-up returns the tiers of the other tag's chunk, and a fetch from these tiers misses.

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
        self._watch: TableWatch | None = None

    def __len__(self) -> int:
        """Return the number of chunks that at least one tier has."""
        return self._count

    @property
    def growing(self) -> bool:
        """Whether rows are being moved to a larger table."""
        return self._next is not self._rows

    @property
    def row_count(self) -> int:
        return len(self._rows)

    @property
    def overflow_count(self) -> int:
        """Number of tags that did not fit into their rows."""
        return len(self._rows.overflow)

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
            if row_of(tag) & len(self._rows) - 1 < self._moved:
                self._next.update(tag, keep=keep, add=add)
            # At two tags per row on average, few of the seven slots of a row overflow. No caller waits for
            # all rows to move.
            if add and self._count > _TAGS_PER_ROW * len(self._rows):
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

    def watch(self, tags: Container[int]) -> TableWatch:
        """Record from now on which chunks tiers gain or lose. A table has one watch; a later one replaces it.

        Args:
            tags: tags of the chunks to watch, a container that one thread may change while others test it.
        """
        self._watch = TableWatch(tags)
        return self._watch

    def count(self, bit: int) -> int:
        """Return the number of keys of a tier. The time is proportional to the size of the table."""
        with self._lock:
            return self._rows.count(bit)

    def _grow(self) -> None:
        """Move the next few rows to a table of twice the size, which finally replaces this one."""
        if self._next is self._rows:
            self._next = TagRows(2 * len(self._rows))
        self._next.copy_rows(self._rows, self._moved, self._moved + self._rows_per_step)
        self._moved += self._rows_per_step
        if self._moved >= len(self._rows):
            for tag, bits in self._rows.overflow.items():
                self._next.update(tag, keep=0, add=bits)
            self._rows, self._moved = self._next, 0
