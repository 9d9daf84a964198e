"""The known chunks of a directory, read from its folders.

The modification time of a folder changes with every file that is added or removed, so `refresh` reads only
the folders that changed. Until then, a known chunk may be evicted, and its fetch misses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import Lock

from kvferry.tiers.files.chunk_file import check_folders
from kvferry.tiers.index import PARTS, ListedKeys
from kvferry.tiers.paths import BUCKET, keys_of

# Two changes within the granularity of file times give a folder the same time. So a folder that changed less
# than this before it was read is read again.
_SETTLED_SECONDS = 2.0
_PAGE_NAMES = 500
# Pause after every page of names, in which other threads run. An engine's thread must not wait.
_PAUSE_SECONDS = 0.001


class DirectoryIndex:
    """Keeps the known keys `listed` of a namespace up to date, which `refresh` changes. Thread-safe.

    `clock` is in seconds since 1970, compared with the modification times of folders. `pause` waits for a
    number of seconds, so that other threads run.
    """

    def __init__(
        self,
        root: str,
        namespace: bytes,
        listed: ListedKeys,
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._root, self._folder = root, f"{root}/{namespace.hex()}"
        self._listed = listed
        self._clock = clock
        self._pause = pause
        # Modification time, in nanoseconds, of each part's folder when it was read; -1: read it again.
        self._read_at: dict[int, int] = {}
        self._refreshing = Lock()

    def refresh(self) -> int:
        """Read the folders that changed since the last call, and return their number."""
        with self._refreshing:
            changed = self._changed()
            for part, time_ns in changed.items():
                # A change after the folder was read, but within the granularity of file times, would stay
                # unseen.
                settled = abs(self._clock() - time_ns / 1e9) > _SETTLED_SECONDS
                self._read(part)
                self._read_at[part] = time_ns if settled else -1
            return len(changed)

    def _changed(self) -> dict[int, int]:
        """Return changed folders' modification times in ns, by first byte; forget keys of missing ones."""
        try:
            check_folders(self._root, f"{self._folder}/")
            with os.scandir(self._folder) as entries:
                found = {
                    int(one.name, 16): one.stat(follow_symlinks=False).st_mtime_ns
                    for one in entries
                    if BUCKET.fullmatch(one.name) and one.is_dir(follow_symlinks=False)
                }
        except OSError:
            found = {}
        missing = [part for part in range(PARTS) if part not in found]
        for part in missing:
            self._read_at.pop(part, None)
        # An empty listing: all keys of missing folders are gone.
        with self._listed.listing(missing):
            pass
        return {part: time_ns for part, time_ns in found.items() if self._read_at.get(part) != time_ns}

    def _read(self, part: int) -> None:
        with self._listed.listing((part,)):
            try:
                names = os.listdir(f"{self._folder}/{part:02x}")
            except OSError:
                names = []
            for at in range(0, len(names), _PAGE_NAMES):
                keys = keys_of(names[at : at + _PAGE_NAMES])
                # Skip keys with another first byte. Their files are in the wrong folder: no fetch finds them.
                self._listed.add_page(key for key in keys if key[0] == part)
                self._pause(_PAUSE_SECONDS)
