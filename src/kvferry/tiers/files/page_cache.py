"""Chunk files in the page cache: whether one is there, and which of a tier's files are brought there.

Stores go past the page cache, which takes the least processor time. But a new file is often read soon, by
another engine of this machine or by this one after a restart. So a tier brings its newest files into the page
cache, while it does not use the disk, and gives the pages of older ones back.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock

import numpy as np

from kvferry.common.machine import is_linux
from kvferry.memory.shared_memory import available_memory

# The limit of the files that a tier keeps in the page cache is the available memory divided by this.
_MEMORY_DIVISOR = 10
# Bytes that one refresh brings in. The rest has time until the next one.
_MOST_BYTES = 1 << 30

_RESIDENT = 1

_libc = ctypes.CDLL(None, use_errno=True) if is_linux() else None
if _libc is not None:
    _libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


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


class CachedFiles:
    """The newest files that a tier has stored, in the page cache up to a limit. Thread-safe.

    `limit` is in bytes, None for a tenth of what `memory` returns: the bytes that can be allocated and what
    limits them, or None.
    """

    def __init__(
        self,
        root: str,
        limit: int | None = None,
        memory: Callable[[], tuple[int, str] | None] = available_memory,
    ) -> None:
        local = _libc is not None and _has_device(root)
        self._follows_memory, self._memory = local and limit is None, memory
        self._lock = Lock()
        self._limit = limit or 0 if local else 0
        # Files that were stored but not brought in yet, and those that were brought in.
        self._new, self._cached = _Files(), _Files()
        self._users = 0
        self._look_at_memory()

    @contextmanager
    def using_disk(self) -> Iterator[None]:
        """Bring no further file in until the ``with`` block ends."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1

    def add(self, path: str, size: int) -> None:
        """Note a new file, for the next refresh."""
        with self._lock:
            self._new.add(path, size)
            self._new.shrink(self._limit)

    def refresh(self) -> None:
        """Bring new files into the page cache, and drop the oldest beyond the limit. This reads the disk."""
        self._look_at_memory()
        done = 0
        while done < _MOST_BYTES and (found := self._next()) is not None:
            path, size = found
            done += size
            # A file that was evicted meanwhile, or cannot be read, is not missed here.
            with suppress(OSError), _opened(path) as fd:
                _bring_in(fd, size)
            with self._lock:
                self._cached.add(path, size)
        with self._lock:
            dropped = self._cached.shrink(self._limit)
        for path in dropped:
            with suppress(OSError), _opened(path) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _look_at_memory(self) -> None:
        if self._follows_memory:
            found = self._memory()
            self._limit = 0 if found is None else found[0] // _MEMORY_DIVISOR

    def _next(self) -> tuple[str, int] | None:
        with self._lock:
            self._new.shrink(self._limit)
            return None if self._users else self._new.pop()


class _Files:
    """Files in the order in which they were added. Not thread-safe."""

    def __init__(self) -> None:
        self._files: deque[tuple[str, int]] = deque()
        self._bytes = 0

    def add(self, path: str, size: int) -> None:
        self._files.append((path, size))
        self._bytes += size

    def pop(self) -> tuple[str, int] | None:
        """Remove and return the first file, if any."""
        if not self._files:
            return None
        path, size = self._files.popleft()
        self._bytes -= size
        return path, size

    def shrink(self, limit: int) -> list[str]:
        """Remove the first files until the rest has at most `limit` bytes. Return the paths of those."""
        removed = []
        while self._bytes > limit and (found := self.pop()) is not None:
            removed.append(found[0])
        return removed


def _has_device(root: str) -> bool:
    # Network mounts and the like have none. There, all files would be read over the network.
    try:
        return os.major(os.stat(root).st_dev) != 0
    except OSError:
        return False


@contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _bring_in(fd: int, size: int) -> None:
    # The kernel reads the file into the page cache and copies nothing to a process.
    with open(os.devnull, "wb") as nothing:
        done = 0
        while done < size and (sent := os.sendfile(nothing.fileno(), fd, done, size - done)):
            done += sent
