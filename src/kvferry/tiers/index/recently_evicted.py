"""A set of recently evicted keys, of fixed size.

Each key has one slot, chosen by its first four bytes, which stores the next eight bytes. A later key replaces
an earlier one in its slot. Two keys are confused with a probability of 2^-64.
"""

from __future__ import annotations

from array import array

_SLOTS = 1 << 17


class RecentlyEvicted:
    """A set of at most 131072 keys that may drop keys, but never adds one. It takes 1 MiB. Thread-safe.

    >>> evicted = RecentlyEvicted()
    >>> evicted.add(bytes(range(32)))
    >>> bytes(range(32)) in evicted, bytes(32) in evicted
    (True, False)
    """

    def __init__(self) -> None:
        self._marks = array("Q", bytes(8 * _SLOTS))

    def __contains__(self, key: bytes) -> bool:
        slot, mark = _slot_and_mark(key)
        return self._marks[slot] == mark

    def add(self, key: bytes) -> None:
        """Add a key of at least 12 bytes."""
        slot, mark = _slot_and_mark(key)
        self._marks[slot] = mark


def _slot_and_mark(key: bytes) -> tuple[int, int]:
    """Return the slot of a key, and its mark, which is never 0: an empty slot is 0."""
    # The last byte numbers the group; the bytes before it are the same for all groups of a chunk.
    slot = (int.from_bytes(key[:4], "big") + 0x9E37 * key[-1]) % _SLOTS
    return slot, int.from_bytes(key[4:12], "big") | 1
