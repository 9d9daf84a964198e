"""Keys that were there lately and are not any more, in little memory.

One slot per key, chosen by its first bytes, holds the eight after those: a later key takes the slot of an
earlier one, which is then forgotten. One key is taken for another once in 2⁶⁴.
"""

from __future__ import annotations

from array import array

_SLOTS = 1 << 17


class RecentlyEvicted:
    """Forgets, but never invents. A mebibyte. Any thread may use it.

    >>> gone = Gone()
    >>> gone.add(bytes(range(32)))
    >>> bytes(range(32)) in gone, bytes(32) in gone
    (True, False)
    """

    def __init__(self) -> None:
        self._marks = array("Q", bytes(8 * _SLOTS))

    def __contains__(self, key: bytes) -> bool:
        slot, mark = _place(key)
        return self._marks[slot] == mark

    def add(self, key: bytes) -> None:
        """It has gone."""
        slot, mark = _place(key)
        self._marks[slot] = mark

    def discard(self, key: bytes) -> None:
        """It is back."""
        slot, mark = _place(key)
        if self._marks[slot] == mark:
            self._marks[slot] = 0


def _place(key: bytes) -> tuple[int, int]:
    """Slot and mark of a key; the mark is never that of an empty slot."""
    # The last byte is a group's number, beside digests that are alike for all groups.
    slot = (int.from_bytes(key[:4], "big") + 0x9E37 * key[-1]) % _SLOTS
    return slot, int.from_bytes(key[4:12], "big") | 1
