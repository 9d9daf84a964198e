"""Movers that write and read raw files: the speed of a directory without kvferry.

Each thread handles one file at a time. Writes create new files and wait until their data is on the disk. Both
bypass the page cache where the file system allows it.
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
    """A mover that writes new files, one per thread, and flushes each."""

    name = "threads, O_DIRECT"

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, files: int, size: int) -> None:
        """Prepare a mover.

        Args:
            folder: folder with room for the files.
            pool: one thread per file in flight.
            files: number of files.
            size: bytes of each file, a multiple of the page size.
        """
        self._folder, self._pool, self._files, self.bytes = folder, pool, files, files * size
        self._content = random_pages(size)

    def move(self) -> float:
        """Write all files; return the seconds until the last is on the disk."""
        with TemporaryDirectory(dir=self._folder) as folder:
            files = [f"{folder}/{number}" for number in range(self._files)]
            return _timed(self._pool, lambda file: write_file(file, self._content), files)


class ThreadReads:
    """A mover that reads files, one per thread."""

    name = "threads, O_DIRECT"

    def __init__(self, pool: ThreadPoolExecutor, files: Sequence[Path]) -> None:
        self._pool = pool
        self._files = [(file, whole_pages(file.stat().st_size)) for file in files]
        self.bytes = sum(len(memory) for _, memory in self._files)

    def move(self) -> float:
        """Read all files; return the seconds until the last is read."""
        return _timed(self._pool, _read, self._files)


def random_pages(size: int) -> memoryview:
    """Return `size` random bytes in page-aligned memory, which storage cannot compress."""
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
