"""A set of recently evicted keys, of fixed size.

A key is stored in one slot, chosen by its first four bytes and its last one. The slot stores 63 bits of the
next eight bytes. A later key replaces an earlier one in the same slot. Two keys of one slot are confused with
a probability of 2^-63.
"""

from __future__ import annotations

_SLOTS = 1 << 17


class RecentlyEvicted:
    """A set of at most 131072 recently evicted keys, in 1 MiB of memory. Thread-safe.

    >>> evicted = RecentlyEvicted()
    >>> evicted.add(bytes(range(32)))
    >>> bytes(range(32)) in evicted, bytes(32) in evicted
    (True, False)
    """

    def __init__(self, slots: int = _SLOTS) -> None:
        self._marks = memoryview(bytearray(8 * slots)).cast("Q")

    def __contains__(self, key: bytes) -> bool:
        slot, mark = self._slot_and_mark(key)
        return self._marks[slot] == mark

    def add(self, key: bytes) -> None:
        """Add the key of an evicted chunk, 12 bytes or more."""
        slot, mark = self._slot_and_mark(key)
        self._marks[slot] = mark

    def _slot_and_mark(self, key: bytes) -> tuple[int, int]:
        # The last byte is the index of the group. All groups of a chunk have the same bytes before it.
        slot = (int.from_bytes(key[:4], "big") + 0x9E37 * key[-1]) % len(self._marks)
        # Never 0, which means an empty slot.
        return slot, int.from_bytes(key[4:12], "big") | 1
