"""Which chunks of a namespace are there, as far as this process knows.

A folder's time of modification changes with every file that comes or goes, so `refresh` reads only the
folders that changed. What the index does not have is looked for on disk; what it has may be gone, which the
fetch finds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from kvferry.tiers.place import chunk_path, is_bucket, key_of

# A change within the granularity of a folder's time does not show: what changed so recently is read again.
_SETTLED_SECONDS = 2.0


class Index:
    """Keys of one namespace, by the first byte. Any thread may use it.

    Args:
        root: the directory of the tier.
        namespace: 32 bytes.
        clock: seconds since 1970, as the file system's.
    """

    def __init__(self, root: str, namespace: bytes, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._namespace = namespace
        self._folder = f"{root}/{namespace.hex()}"
        self._clock = clock
        self._keys: dict[int, set[bytes]] = {}
        self._read_at: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(len(keys) for keys in list(self._keys.values()))

    def refresh(self) -> int:
        """Read the folders that have changed since they were read.

        Returns:
            How many that were.
        """
        read = 0
        for bucket, status in self._buckets().items():
            if self._read_at.get(bucket) == status:
                continue
            settled = abs(self._clock() - status / 1e9) > _SETTLED_SECONDS
            self._keys[bucket] = self._list(bucket)
            self._read_at[bucket] = status if settled else -1
            read += 1
        return read

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are there; those it does not have are looked for on disk."""
        return [self._has(key) or self._look(key) for key in keys]

    def add(self, key: bytes) -> None:
        """A chunk has come."""
        self._keys.setdefault(key[0], set()).add(key)

    def discard(self, key: bytes) -> None:
        """A chunk is not there."""
        self._keys.get(key[0], set()).discard(key)

    def _has(self, key: bytes) -> bool:
        return key in self._keys.get(key[0], ())

    def _look(self, key: bytes) -> bool:
        if not os.path.exists(chunk_path(self._root, self._namespace, key)):
            return False
        self.add(key)
        return True

    def _buckets(self) -> dict[int, int]:
        """Time of modification, in nanoseconds, of every folder; those that are gone are forgotten."""
        try:
            with os.scandir(self._folder) as entries:
                found = {int(one.name, 16): one.stat().st_mtime_ns for one in entries if is_bucket(one.name)}
        except OSError:
            found = {}
        for bucket in list(self._keys):
            if bucket not in found:
                del self._keys[bucket]
        return found

    def _list(self, bucket: int) -> set[bytes]:
        try:
            names = os.listdir(f"{self._folder}/{bucket:02x}")
        except OSError:
            return set()
        return {key for name in names if (key := key_of(name)) is not None}
