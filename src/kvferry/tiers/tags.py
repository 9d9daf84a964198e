"""Which keys are there, for who asks for thousands at once: by *tags*, their last eight bytes.

A set of Python's is asked for one key after another and waits for memory at each: among a million keys a
third of a microsecond, several times what a table of numpy takes that is asked for all. Keys are digests, so
tags tell them apart but for accidents, one in 2^56 pairs of a group: a chunk is thought to be there then that
is not, which its fetch finds, since that goes by the whole key.

A tag lies in one bucket. Buckets are a quarter full at most, so hardly one is ever too small; what has no
place in its own is in `_over`, whoever chose the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TAG_BYTES = 8
Uint64s: TypeAlias = npt.NDArray[np.uint64]

_WAYS = 16
_MOST = _WAYS // 4
_FEWEST = 1 << 6
_PIECE = 1 << 12  # buckets; other threads run in between
_LAST_BYTE = 56
_APART = 0x9E3779B1  # of one chunk's groups, which differ in the last byte alone


def tags_of(keys: Sequence[bytes]) -> Uint64s:
    """Of keys of at least `TAG_BYTES`: uint64 of shape (len(keys),)."""
    return np.frombuffer(b"".join([key[-TAG_BYTES:] for key in keys]), "<u8")


class Tags:
    """One thread at a time may change it, while any other asks.

    >>> here, gone = bytes(31) + b"a", bytes(31) + b"b"
    >>> tags = Tags([here, gone])
    >>> tags.discard(gone)
    >>> tags.known(tags_of([here, gone]))
    array([ True, False])
    """

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self.clear()
        for key in keys:
            self.add(key)

    def __len__(self) -> int:
        return self._count

    def known(self, tags: Uint64s) -> npt.NDArray[np.bool_]:
        """Which are there: bool of the shape of `tags`, (n,)."""
        table, over = self._table, self._over
        tags = np.maximum(tags, 1)
        at = (_mixed(tags) & np.uint64(len(table) - 1)).view(np.int64)
        # None is outside of the table: given a mode, numpy does not look.
        buckets = table.take(at, axis=0, mode="clip")
        # Eight bools at a time: any() of rows as short as these takes longer than all the rest.
        found: npt.NDArray[np.bool_] = np.bitwise_or(*(buckets == tags[:, None]).view(np.uint64).T) != 0
        if over:
            missed = np.flatnonzero(~found)
            found[missed] = [tag in over for tag in tags[missed].tolist()]
        return found

    def add(self, key: bytes) -> None:
        """It is there."""
        tag = _tag(key)
        first, bucket = self._bucket(tag)
        if tag in bucket or tag in self._over:
            return
        if 0 in bucket:
            self._flat[first + bucket.index(0)] = tag
        else:
            self._over.add(tag)
        self._count += 1
        if self._count > _MOST * len(self._table):
            self._double()

    def discard(self, key: bytes) -> None:
        """It is not there."""
        tag = _tag(key)
        first, bucket = self._bucket(tag)
        if tag in bucket:
            self._flat[first + bucket.index(tag)] = 0
        elif tag in self._over:
            self._over.remove(tag)
        else:
            return
        self._count -= 1

    def clear(self) -> None:
        """None is there."""
        self._count, self._over = 0, set[int]()
        self._use(np.zeros((_FEWEST, _WAYS), np.uint64))

    def _bucket(self, tag: int) -> tuple[int, list[int]]:
        """Where a tag's bucket begins, and what is in it."""
        first = (tag + (tag >> _LAST_BYTE) * _APART & self._mask) * _WAYS
        return first, self._flat[first : first + _WAYS].tolist()

    def _double(self) -> None:
        """What is in a bucket goes to two, by one bit more of each tag."""
        size = len(self._table)
        table = np.zeros((2 * size, _WAYS), np.uint64)
        for at in range(0, size, _PIECE):
            old = self._table[at : at + _PIECE]
            higher = (_mixed(old) & np.uint64(size)) != 0
            np.multiply(old, ~higher, out=table[at : at + len(old)])
            np.multiply(old, higher, out=table[size + at : size + at + len(old)])
        self._use(table)

    def _use(self, table: Uint64s) -> None:
        self._table, self._mask = table, len(table) - 1
        self._flat = table.reshape(-1).data


def _tag(key: bytes) -> int:
    """Never 0, which is nothing."""
    return int.from_bytes(key[-TAG_BYTES:], "little") or 1


def _mixed(tags: Uint64s) -> Uint64s:
    """Whose lowest bits name buckets; those of a key's groups lie apart."""
    return tags + (tags >> np.uint64(_LAST_BYTE)) * np.uint64(_APART)
