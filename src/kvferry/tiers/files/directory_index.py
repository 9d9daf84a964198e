"""The index of the chunks in a directory, read from its folders.

A folder's modification time changes with every file that is added or removed, so `refresh` reads only the
folders that changed. A known chunk may be gone; its fetch then misses. The next `refresh` adds chunks that
other processes stored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import Lock

from kvferry.tiers.files.regular_file import check_folders
from kvferry.tiers.index.listed_keys import PARTS, ListedKeys
from kvferry.tiers.paths import is_chunk_folder, keys_of

# Two changes within the granularity of a folder's time look like one: a folder that changed so recently is
# read again.
_SETTLED_SECONDS = 2.0
_PAGE_NAMES = 500
# An engine's thread must not wait for a large directory: other threads run after every page.
_PAUSE_SECONDS = 0.001


class DirectoryIndex:
    """Keeps the keys of one namespace up to date. Any thread may use it.

    Args:
        root: the directory of the tier.
        namespace: 32 bytes.
        listed: keys, updated from the folders.
        clock: seconds since 1970, by the file system's clock.
        pause: function that lets other threads run for a number of seconds.
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
        # By part: modification time, in nanoseconds, of the folder when it was read; -1 until it has settled.
        self._read_at: dict[int, int] = {}
        self._refreshing = Lock()

    def refresh(self) -> int:
        """Read the folders that changed since the last read; return their number."""
        with self._refreshing:
            changed = self._changed()
            for part, time_ns in changed.items():
                settled = abs(self._clock() - time_ns / 1e9) > _SETTLED_SECONDS
                self._read(part)
                self._read_at[part] = time_ns if settled else -1
            return len(changed)

    def _changed(self) -> dict[int, int]:
        """Return the modification time of each changed folder; remove the keys of missing folders."""
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
        missing = [part for part in range(PARTS) if part not in found]
        for part in missing:
            self._read_at.pop(part, None)
        with self._listed.listing(missing):
            pass
        return {part: time_ns for part, time_ns in found.items() if self._read_at.get(part) != time_ns}

    def _read(self, part: int) -> None:
        with self._listed.listing((part,)):
            names = self._list(part)
            for at in range(0, len(names), _PAGE_NAMES):
                keys = keys_of(names[at : at + _PAGE_NAMES])
                # A file whose key begins with another byte is in the wrong folder, where no fetch looks.
                self._listed.show(key for key in keys if key[0] == part)
                self._pause(_PAUSE_SECONDS)

    def _list(self, part: int) -> list[str]:
        try:
            return os.listdir(f"{self._folder}/{part:02x}")
        except OSError:
            return []
