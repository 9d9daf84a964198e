"""A queue of keys and their sizes, the building block of all eviction policies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class ByteQueue:
    """A queue of chunk keys and the sizes of their chunks, from the oldest to the newest key.

    A pinned key has no place in the order, but its chunk counts in `total`. `remove`, `make_newest`, `pin`,
    `unpin` and `move` raise KeyError if the key is not in the queue. `pin` also raises KeyError for a pinned
    key, and `unpin` for an unpinned key. All methods except `trim` and `check_integrity` take constant time.

    Attributes:
        total: total bytes of the chunks of all keys, pinned or not.
    """

    def __init__(self) -> None:
        self.total = 0
        self._unpinned: OrderedDict[bytes, int] = OrderedDict()
        self._pinned: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._unpinned) + len(self._pinned)

    def __contains__(self, key: object) -> bool:
        return key in self._unpinned or key in self._pinned

    def is_pinned(self, key: bytes) -> bool:
        return key in self._pinned

    @property
    def unpinned(self) -> int:
        return len(self._unpinned)

    def push(self, key: bytes, size: int) -> None:
        """Add a key as the newest. It must not be in the queue yet."""
        self._unpinned[key] = size
        self.total += size

    def push_all(self, keys: Iterable[bytes], size: int) -> None:
        """Add keys of chunks of `size` bytes each, the last as the newest. None may be in the queue yet."""
        before = len(self._unpinned)
        self._unpinned.update(dict.fromkeys(keys, size))
        self.total += (len(self._unpinned) - before) * size

    def has_any(self, keys: Iterable[bytes]) -> bool:
        unpinned, pinned = self._unpinned.keys(), self._pinned.keys()
        return bool((unpinned and not unpinned.isdisjoint(keys)) or (pinned and not pinned.isdisjoint(keys)))

    def pop(self) -> tuple[bytes, int]:
        """Remove the oldest unpinned key. Return it and its size.

        Raises:
            KeyError: there is no unpinned key.
        """
        key, size = self._unpinned.popitem(last=False)
        self.total -= size
        return key, size

    def pop_bytes(self, size: int) -> list[bytes]:
        """Remove the oldest unpinned keys until their chunks have `size` bytes, or there are no more."""
        # Local names: a simulation evicts millions of keys here.
        unpinned, pop, keys, until = self._unpinned, self._unpinned.popitem, list[bytes](), self.total - size
        total = self.total
        while total > until and unpinned:
            key, freed = pop(last=False)
            total -= freed
            keys.append(key)
        self.total = total
        return keys

    def oldest(self, size: int) -> tuple[list[bytes], int]:
        """Return the keys that `pop_bytes` would remove, and the total bytes of their chunks."""
        found, total = list[bytes](), 0
        for key, each in self._unpinned.items():
            if total >= size:
                break
            found.append(key)
            total += each
        return found, total

    def remove(self, key: bytes) -> int:
        """Remove a key, pinned or not. Return its size."""
        size = self._unpinned.pop(key) if key in self._unpinned else self._pinned.pop(key)
        self.total -= size
        return size

    def remove_all(self, keys: Iterable[bytes]) -> None:
        """Remove those of the keys that are in the queue and not pinned."""
        for key in keys:
            if key in self._unpinned:
                self.remove(key)

    def make_newest(self, key: bytes) -> None:
        """Make a key the newest of the queue. A pinned key becomes the newest when it is unpinned."""
        if key not in self._pinned:
            self._unpinned.move_to_end(key)

    def make_newest_of(self, keys: Iterable[bytes]) -> None:
        """Make those of the keys that are in the queue and not pinned its newest, in their order."""
        unpinned, move = self._unpinned, self._unpinned.move_to_end
        for key in keys:
            if key in unpinned:
                move(key)

    def pin(self, key: bytes) -> None:
        """Take a key out of the order, so that `pop` cannot return it."""
        self._pinned[key] = self._unpinned.pop(key)

    def unpin(self, key: bytes) -> None:
        """Put a pinned key back into the order, as the newest."""
        self._unpinned[key] = self._pinned.pop(key)

    def move(self, key: bytes, to: ByteQueue) -> None:
        """Move a key to another queue, as the newest key there. A pinned key stays pinned."""
        pinned = key in self._pinned
        to.push(key, self.remove(key))
        if pinned:
            to.pin(key)

    def trim(self, most: int) -> None:
        """Remove the oldest keys until at most `most` bytes are left. No key may be pinned."""
        while self.total > most:
            self.pop()

    def check_integrity(self) -> None:
        found = sum(self._unpinned.values()) + sum(self._pinned.values())
        if found != self.total:
            raise AssertionError(f"a queue of {found} bytes says {self.total}")
        if both := self._unpinned.keys() & self._pinned.keys():
            raise AssertionError(f"{len(both)} keys are pinned and in the queue")


def check_disjoint(queues: Iterable[ByteQueue]) -> None:
    """Check that every queue is consistent, and that no key is in two queues, or raise AssertionError."""
    seen: set[bytes] = set()
    for queue in queues:
        queue.check_integrity()
        for key in (*queue._unpinned, *queue._pinned):  # noqa: SLF001 - one idea in one file
            if key in seen:
                raise AssertionError(f"key {key.hex()} is in two queues")
            seen.add(key)
