"""Pages of host memory: huge pages, and threads that allocate or move pages while an engine runs.

Huge pages matter twice. A transport that copies between processes pins memory page by page: with pages of
4 KiB that takes about five times as long as with pages of 2 MiB. And a huge page is allocated in a third of
the time of its 512 small pages.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from kvferry.common.machine import is_linux, usable_cores
from kvferry.common.threads import Thread
from kvferry.geometry import Region

# MADV_HUGEPAGE applies to pages that are written later, MADV_COLLAPSE (Linux 6.1) to pages in use.
# MADV_POPULATE_WRITE (Linux 5.14) allocates memory at once, or fails.
_HUGEPAGE, _POPULATE_WRITE, _COLLAPSE = 14, 23, 25
_PAGE, _LARGE_PAGE = 4096, 2 << 20
# A collapse holds the lock of the process's memory, which other threads need for each page fault. With steps
# of 32 MiB at the lowest priority, single hand-overs of 17 ms took 107 ms. With these they take up to 27 ms.
_COLLAPSE_STEP_BYTES, _PAUSE_SECONDS = 4 << 20, 0.01

PAGES_THREAD = "kvferry-pages"
"""Name of all threads that allocate or move pages."""

# The kernel waits for all cores once per call of MADV_COLLAPSE. While it allocates, the process can map no
# other memory.
POPULATE_STEP_BYTES = 64 << 20
_MOST_THREADS = 16

_log = logging.getLogger(__name__)


def request_huge_pages(region: Region) -> None:
    """Ask the kernel to back host memory that is written later with huge pages. It may refuse."""
    # If /sys/kernel/mm/transparent_hugepage/enabled is madvise, a process must request huge pages, which
    # torch does not. If shmem_enabled is never, the default, shared memory gets none. MADV_COLLAPSE ignores
    # both settings.
    if _is_host_memory(region):
        first, end = _whole_pages(region)
        _advise(first, end - first, _HUGEPAGE)


class HugePageCollapser:
    """A thread that moves host memory in use to huge pages. It must stay mapped until `stop` returns."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions, self._stopped = [one for one in regions if _is_host_memory(one)], threading.Event()
        self._thread = Thread(self._run, PAGES_THREAD)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended. Then the memory may be unmapped."""
        self._stopped.set()
        self._thread.join()

    def wait(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        for region in self._regions:
            for first, end in _steps(*_whole_pages(region)):
                if self._stopped.wait(_PAUSE_SECONDS):
                    return
                if _advise(first, end - first, _COLLAPSE) == errno.EINVAL:
                    return  # EINVAL: this kernel cannot collapse pages; other errors concern only these pages


class PagePopulator:
    """Threads that allocate the memory of a file, from its beginning to its end, in huge pages if possible.

    Memory below `ready_bytes` can be used without a page fault that fails, which would kill the process.

    Attributes:
        ready_bytes: number of bytes, from the beginning of the region, that are allocated. It only grows.
        failure: why the rest cannot be allocated; None if there is no such reason.
    """

    def __init__(
        self,
        fd: int,
        region: Region,
        on_end: Callable[[PagePopulator], None] = lambda _: None,
        threads: int | None = None,
    ) -> None:
        """Allocate the first `POPULATE_STEP_BYTES`, and start the threads for the rest.

        Args:
            fd: descriptor of the file, which is mapped as a whole to `region`. Both must stay valid until
                `stop` returns.
            on_end: function that the last thread calls with this object, when all memory is allocated, or the
                rest has failed to be.
            threads: number of threads; None for half of the cores, at most 16.

        Raises:
            OSError: not even the first bytes can be allocated.
        """
        self.ready_bytes = 0
        self.failure: str | None = None
        self._fd, self._region, self._on_end = fd, region, on_end
        self._stopped, self._lock = False, threading.Lock()
        self._steps = iter(range(0, region.length, POPULATE_STEP_BYTES))
        self._done = set[int]()
        self._allocate(next(self._steps))
        number = threads or min(max(len(usable_cores()) // 2, 1), _MOST_THREADS)
        self._running = number
        self._threads = [Thread(self._run, PAGES_THREAD) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    @property
    def ended(self) -> bool:
        """Whether all memory is allocated, or the rest has failed to be."""
        return not self._running

    def stop(self) -> None:
        """Stop the threads, and wait until they have ended. Then the memory may be unmapped."""
        self._stopped = True
        self.wait()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            while (at := self._next()) is not None:
                self._allocate(at)
        except OSError as error:
            self.failure = os.strerror(error.errno or 0)
        with self._lock:
            self._running -= 1
            last = not self._running
        if last and not self._stopped:
            self._on_end(self)

    def _next(self) -> int | None:
        with self._lock:
            return None if self._stopped or self.failure else next(self._steps, None)

    def _allocate(self, at: int) -> None:
        size = min(POPULATE_STEP_BYTES, self._region.length - at)
        address = self._region.address + at
        # With one small page in each, the kernel fills the rest of a huge page with zeros, and allocates no
        # other small pages, which it would have to copy.
        for page in range(address, address + size, _LARGE_PAGE):
            _advise(page, _PAGE, _POPULATE_WRITE)
        _advise(address, size, _COLLAPSE)
        # What is in no huge page.
        if (code := _advise(address, size, _POPULATE_WRITE)) == errno.EINVAL:
            # Before Linux 5.14. This allocates, too, but does not map the memory into this process.
            os.posix_fallocate(self._fd, at, size)
        elif code:
            raise OSError(code, os.strerror(code))
        with self._lock:
            self._done.add(at)
            # A thread may be done with a later step first.
            while self.ready_bytes in self._done:
                self._done.remove(self.ready_bytes)
                self.ready_bytes = min(self.ready_bytes + POPULATE_STEP_BYTES, self._region.length)


def _is_host_memory(region: Region) -> bool:
    return region.memory == "DRAM" and is_linux()


def _whole_pages(region: Region) -> tuple[int, int]:
    """Return the addresses of the first whole page in a region, and of the end of the last."""
    first = -(-region.address // _PAGE) * _PAGE
    return first, max(first, (region.address + region.length) // _PAGE * _PAGE)


def _steps(first: int, end: int) -> Iterator[tuple[int, int]]:
    # Steps meet at multiples of a huge page: one that lies in two steps would not be collapsed.
    for at in range(first // _LARGE_PAGE * _LARGE_PAGE, end, _COLLAPSE_STEP_BYTES):
        yield max(first, at), min(at + _COLLAPSE_STEP_BYTES, end)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _advise(address: int, length: int, advice: int) -> int:
    if not _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice):
        return 0
    error = ctypes.get_errno()
    _log.debug("madvise %d of %d bytes: %s", advice, length, os.strerror(error))
    return error
