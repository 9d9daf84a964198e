"""Which chunks of a namespace are there, as far as this process knows.

A folder's time of modification changes with every file that comes or goes, so `refresh` reads only the
folders that changed. What the index has may be gone, which the fetch finds; what others stored shows with the
next `refresh`.

An engine's thread asks, and goes on while another thread refreshes: keys are kept in one set per folder, so
that no step of any call, such as the growth of a set, takes long, and `refresh` rests after every
millisecond's work at most. Which are there is asked by their tags (`tags`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from threading import Lock

from kvferry.tiers.files.regular_file import check_folders
from kvferry.tiers.index.key_table import TierKeys
from kvferry.tiers.index.recently_evicted import RecentlyEvicted
from kvferry.tiers.paths import is_chunk_folder, keys_of

# A change within the granularity of a folder's time does not show: what changed so recently is read again.
_SETTLED_SECONDS = 2.0
_PIECE = 500
_REST_SECONDS = 0.001

_BUCKETS = 256


class DirectoryIndex:
    """Keys of one namespace, by the first byte. Any thread may use it.

    Attributes:
        gone: those that were known lately.

    Args:
        root: the directory of the tier.
        namespace: 32 bytes.
        tags: empty; kept up to date.
        clock: seconds since 1970, as the file system's.
        rest: lets other threads run for so many seconds.
    """

    def __init__(
        self,
        root: str,
        namespace: bytes,
        tags: TierKeys,
        clock: Callable[[], float] = time.time,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        self._root, self._folder = root, f"{root}/{namespace.hex()}"
        self._clock = clock
        self._rest = rest
        self._keys: list[set[bytes]] = [set() for _ in range(_BUCKETS)]
        self._tags = tags
        self.gone = RecentlyEvicted()
        # Of the folders that have settled, when they were changed, in nanoseconds.
        self._read_at: dict[int, int] = {}
        # Of the folder that is being read, what has come and gone since: its names may be from before.
        self._since: tuple[int, dict[bytes, bool]] = (_BUCKETS, {})
        self._changing = Lock()
        self._refreshing = Lock()

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def add(self, key: bytes) -> None:
        """A chunk has come."""
        self._note(key, there=True)

    def discard(self, key: bytes) -> None:
        """A chunk is not there."""
        self._note(key, there=False)

    def refresh(self) -> int:
        """Read the folders that have changed since they were read.

        Returns:
            How many that were.
        """
        with self._refreshing:
            changed = self._changed()
            for bucket, time_ns in changed.items():
                settled = abs(self._clock() - time_ns / 1e9) > _SETTLED_SECONDS
                self._read(bucket)
                self._read_at[bucket] = time_ns if settled else -1
            return len(changed)

    def _changed(self) -> dict[int, int]:
        """Time of modification of every folder that changed; those that are gone are forgotten."""
        try:
            check_folders(self._root, f"{self._folder}/")
            with os.scandir(self._folder) as entries:
                found = {
                    int(one.name, 16): one.stat(follow_symlinks=False).st_mtime_ns
                    for one in entries
                    if is_chunk_folder(one.name) and one.is_dir(follow_symlinks=False)
                }
        except OSError:
            found = {}
        for bucket in set(range(_BUCKETS)) - found.keys():
            self._read_at.pop(bucket, None)
            with self._changing:
                self._lose(self._keys[bucket])
                self._keys[bucket] = set()
        return {bucket: time_ns for bucket, time_ns in found.items() if self._read_at.get(bucket) != time_ns}

    def _read(self, bucket: int) -> None:
        with self._changing:
            self._since = (bucket, {})
        keys: set[bytes] = set()
        names = self._list(bucket)
        for at in range(0, len(names), _PIECE):
            piece = set(keys_of(names[at : at + _PIECE]))
            keys |= piece
            with self._changing:
                for key in piece - self._keys[bucket]:
                    self._tags.add(key)
            self._rest(_REST_SECONDS)
        with self._changing:
            for key, there in self._since[1].items():
                for of in (keys, self._tags):
                    (of.add if there else of.discard)(key)
            self._lose(self._keys[bucket] - keys)
            self._keys[bucket] = keys
            self._since = (_BUCKETS, {})

    def _list(self, bucket: int) -> list[str]:
        try:
            return os.listdir(f"{self._folder}/{bucket:02x}")
        except OSError:
            return []

    def _note(self, key: bytes, *, there: bool) -> None:
        with self._changing:
            bucket, since = self._since
            keys = self._keys[key[0]]
            if not there and key in keys:
                self.gone.add(key)
            for of in (keys, self._tags):
                (of.add if there else of.discard)(key)
            if key[0] == bucket:
                since[key] = there

    def _lose(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.gone.add(key)
            self._tags.discard(key)
