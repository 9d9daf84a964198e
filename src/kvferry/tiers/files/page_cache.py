"""Chunk files in the page cache: whether one is there, its way to the disk, and how many stay there.

A new file is written through the page cache and stays there, so that another engine of this machine, or this
one after a restart, reads it at the speed of memory. Left alone, the kernel would keep all files in this way,
and drop pages of other programs for them. So a tier keeps only the newest, up to a limit.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock

import numpy as np

from kvferry.common.machine import is_linux
from kvferry.memory.shared_memory import available_memory

# The limit of the files that a tier keeps in the page cache is the available memory divided by this.
_MEMORY_DIVISOR = 10

_RESIDENT = 1
# SYNC_FILE_RANGE_WRITE, and the same with WAIT_BEFORE and WAIT_AFTER.
_START, _START_AND_WAIT = 2, 7

_libc = ctypes.CDLL(None, use_errno=True) if is_linux() else None
if _libc is not None:
    _libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    _libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def in_page_cache(fd: int, size: int) -> bool:
    """Return whether the first `size` bytes of a file, at least 1, are all in the page cache."""
    if _libc is None:
        return False
    try:
        # Mapped, but never touched: the kernel only says which pages it has.
        with mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            pages = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
            start = np.frombuffer(mapped, np.uint8)
            failed = _libc.mincore(start.ctypes.data, size, pages.ctypes.data)
            del start
    except (OSError, ValueError):  # ValueError: the file is shorter
        return False
    return not failed and bool((pages & _RESIDENT).all())


def start_writeback(fd: int, begin: int, size: int) -> None:
    """Start to write a range of a file from the page cache to the disk."""
    _sync_range(fd, begin, size, _START)


def finish_writeback(fd: int) -> None:
    """Wait until a file is written from the page cache to the disk. Raise OSError if the disk refused it."""
    _sync_range(fd, 0, 0, _START_AND_WAIT)


def _sync_range(fd: int, begin: int, size: int, flags: int) -> None:
    assert _libc is not None  # noqa: S101 - elsewhere no file is kept
    if _libc.sync_file_range(fd, begin, size, flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class KeptFiles:
    """The files that a tier has written and keeps in the page cache: the newest, up to a limit. Thread-safe.

    `limit` is in bytes, None for a tenth of what `memory` returns: the bytes that can be allocated and what
    limits them, or None.
    """

    def __init__(
        self,
        root: str,
        limit: int | None = None,
        memory: Callable[[], tuple[int, str] | None] = available_memory,
    ) -> None:
        # Network mounts and the like have no block device. Their clients report errors of a cached write when
        # the file is closed, and other machines' reads need it on the server at once.
        local = _libc is not None and os.major(os.stat(root).st_dev) != 0
        self._follows_memory, self._memory = local and limit is None, memory
        self._lock = Lock()
        self._files: deque[tuple[str, int]] = deque()  # paths and bytes, the oldest first
        self._bytes, self._limit = 0, limit or 0 if local else 0
        self.adjust()

    def fits(self, size: int) -> bool:
        """Return whether a new file of `size` bytes should be kept."""
        return size <= self._limit

    def add(self, path: str, size: int) -> None:
        """Keep a file that was written through the page cache, and drop the oldest beyond the limit."""
        with self._lock:
            self._files.append((path, size))
            self._bytes += size
        self._drop()

    def adjust(self) -> None:
        """Set the limit by the memory that is available now, unless it is fixed."""
        if self._follows_memory:
            found = self._memory()
            self._limit = 0 if found is None else found[0] // _MEMORY_DIVISOR
            self._drop()

    def _drop(self) -> None:
        dropped = []
        with self._lock:
            while self._bytes > self._limit:
                path, size = self._files.popleft()
                self._bytes -= size
                dropped.append(path)
        for path in dropped:
            # A file that was evicted has no pages any more.
            with suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)
