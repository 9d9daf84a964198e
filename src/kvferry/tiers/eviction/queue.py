"""Keys in order, with their bytes: what all policies are made of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class ByteQueue:
    """A queue of keys from oldest to newest; pinned keys stand beside it, and count.

    Every operation takes constant time. Raises KeyError for a key that is not where the verb needs it.

    Attributes:
        total: bytes of all keys, pinned ones too.
    """

    def __init__(self) -> None:
        self.total = 0
        self._loose: OrderedDict[bytes, int] = OrderedDict()
        self._pinned: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Keys, pinned ones too."""
        return len(self._loose) + len(self._pinned)

    def __contains__(self, key: object) -> bool:
        """Whether the key is in the queue or pinned beside it."""
        return key in self._loose or key in self._pinned

    @property
    def loose(self) -> int:
        """Keys that are not pinned."""
        return len(self._loose)

    def push(self, key: bytes, size: int) -> None:
        """Add a key as the newest."""
        self._loose[key] = size
        self.total += size

    def pop(self) -> tuple[bytes, int]:
        """Take out the oldest that is not pinned, with its bytes."""
        key, size = self._loose.popitem(last=False)
        self.total -= size
        return key, size

    def remove(self, key: bytes) -> int:
        """Take out a key, pinned or not; returns its bytes."""
        size = self._loose.pop(key) if key in self._loose else self._pinned.pop(key)
        self.total -= size
        return size

    def renew(self, key: bytes) -> None:
        """Make it the newest; a pinned one will be when it is unpinned."""
        if key not in self._pinned:
            self._loose.move_to_end(key)

    def pin(self, key: bytes) -> None:
        """Take it out of the order."""
        self._pinned[key] = self._loose.pop(key)

    def unpin(self, key: bytes) -> None:
        """Back into the order, as the newest."""
        self._loose[key] = self._pinned.pop(key)

    def move(self, key: bytes, to: ByteQueue) -> None:
        """Give it to another queue as the newest there; pinned here, it is pinned there."""
        pinned = key in self._pinned
        to.push(key, self.remove(key))
        if pinned:
            to.pin(key)

    def trim(self, most: int) -> None:
        """Drop the oldest until at most `most` bytes are left; for ghosts, which are never pinned."""
        while self.total > most:
            self.pop()

    def check_integrity(self) -> None:
        """Raises AssertionError where the sum is not the sum, or a key stands twice."""
        found = sum(self._loose.values()) + sum(self._pinned.values())
        if found != self.total:
            raise AssertionError(f"a queue of {found} bytes says {self.total}")
        if both := self._loose.keys() & self._pinned.keys():
            raise AssertionError(f"{len(both)} keys are pinned and in the queue")


def check_disjoint(queues: Iterable[ByteQueue]) -> None:
    """Every key is in one of the queues only, and each is sound.

    Raises:
        AssertionError: otherwise.
    """
    seen: set[bytes] = set()
    for queue in queues:
        queue.check_integrity()
        for key in (*queue._loose, *queue._pinned):  # noqa: SLF001 - one idea in one file
            if key in seen:
                raise AssertionError(f"key {key.hex()} is in two queues")
            seen.add(key)
