"""Files of a size, written and read without us: what a directory can do.

Threads of this process, each with a file at a time. Writes make files anew and count when their data is on
the disk; both go past the page cache where the file system allows it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from kvferry.tiers.files.direct_io import read_all, whole_pages, write_all

_Item = TypeVar("_Item")


class ThreadWrites:
    """New files, each by one thread, flushed one by one; a `Mover`."""

    name = "threads, O_DIRECT"

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, files: int, size: int) -> None:
        """Prepare.

        Args:
            folder: which has room.
            pool: as many threads as files are under way.
            files: how many.
            size: bytes of each, whole pages.
        """
        self._folder, self._pool, self._files, self.bytes = folder, pool, files, files * size
        self._content = random_pages(size)

    def move(self) -> float:
        """Write once; seconds until the last file is on the disk."""
        with TemporaryDirectory(dir=self._folder) as folder:
            files = [f"{folder}/{number}" for number in range(self._files)]
            return _timed(self._pool, lambda file: write_file(file, self._content), files)


class ThreadReads:
    """Files, each by one thread; a `Mover`."""

    name = "threads, O_DIRECT"

    def __init__(self, pool: ThreadPoolExecutor, files: Sequence[Path]) -> None:
        self._pool = pool
        self._files = [(file, whole_pages(file.stat().st_size)) for file in files]
        self.bytes = sum(len(memory) for _, memory in self._files)

    def move(self) -> float:
        """Read once; seconds until the last file is there."""
        return _timed(self._pool, _read, self._files)


def random_pages(size: int) -> memoryview:
    """Memory of `size` bytes that begins at a page and holds nothing that storage could make smaller."""
    pages = whole_pages(size)
    pages[:] = os.urandom(size)
    return pages


def write_file(path: str, content: memoryview) -> None:
    """Write a new file, and wait until its data is on the disk."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC)
    try:
        write_all(fd, [content])
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _read(what: tuple[Path, memoryview]) -> None:
    fd = os.open(what[0], os.O_RDONLY | os.O_CLOEXEC)
    try:
        read_all(fd, [what[1]])
    finally:
        os.close(fd)


def _timed(pool: ThreadPoolExecutor, what: Callable[[_Item], None], items: Sequence[_Item]) -> float:
    started = time.perf_counter()
    for _ in pool.map(what, items):
        pass
    return time.perf_counter() - started
