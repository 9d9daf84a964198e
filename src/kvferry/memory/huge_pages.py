"""Huge pages for host memory that is transferred and copied.

A transport that copies between processes pins memory page by page. With pages of 4 KiB that takes about five
times as long as with pages of 2 MiB.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading

from kvferry.geometry import Region

logger = logging.getLogger(__name__)

# MAP_FIXED replaces an existing mapping at the address. MAP_NORESERVE reserves addresses, but no memory.
_FIXED, _NORESERVE = 0x10, 0x4000
# MADV_HUGEPAGE applies to pages that are written later, MADV_COLLAPSE (Linux 6.1) to pages in use.
_HUGEPAGE, _COLLAPSE = 14, 25
_PAGE, _LARGE_PAGE = 4096, 2 << 20
_STEP_BYTES = 32 << 20

# Memory in use that is moved at once. A larger region would delay an engine's start for minutes.
COLLAPSE_BYTES = 8 << 30


def request_huge_pages(region: Region, *, touched: bool) -> None:
    """Ask the kernel to back host memory with huge pages. If it refuses, the memory stays as it is.

    If the memory was `touched`, which means written to, at most `COLLAPSE_BYTES` are moved to huge pages at
    once. This takes about as long as writing to the whole region.
    """
    first = -(-region.address // _PAGE) * _PAGE
    length = (region.address + region.length - first) // _PAGE * _PAGE
    if region.memory != "DRAM" or os.uname().sysname != "Linux":
        return
    # If /sys/kernel/mm/transparent_hugepage/enabled is madvise, a process must request huge pages, which
    # torch does not. If shmem_enabled is never, the default, shared memory gets none. MADV_COLLAPSE ignores
    # both settings.
    for advice in (_HUGEPAGE, _COLLAPSE) if touched and length <= COLLAPSE_BYTES else (_HUGEPAGE,):
        _advise(first, length, advice)


def map_shared(fd: int, size: int, *, writable: bool = True) -> tuple[mmap.mmap, int]:
    """Map a shared memory file at an address that is a multiple of the size of a huge page.

    Returns:
        The mapping, and the byte offset in it at which the file begins. The file is unmapped when the mapping
        is closed.

    Raises:
        OSError: the file cannot be mapped.
    """
    # Reserve a huge page more than needed, then map the file over it at the first multiple.
    room = mmap.mmap(-1, size + _LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    skip = -address % _LARGE_PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    there = libc.mmap(
        ctypes.c_void_p(address + skip),
        ctypes.c_size_t(size),
        mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
        mmap.MAP_SHARED | _FIXED,
        fd,
        ctypes.c_long(0),
    )
    if there != address + skip:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return room, skip


class HugePageCollapser:
    """A thread that moves memory in use to huge pages, in seconds per GiB. Pages not in use are skipped.

    Args:
        region: memory to move; it must stay mapped until `stop` returns.
    """

    def __init__(self, region: Region) -> None:
        self._region, self._stopped = region, threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-pages", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended. After that, it is safe to unmap the memory."""
        self._stopped.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait until the thread has moved the memory. Parts that the kernel cannot move stay as they are."""
        self._thread.join()

    def _run(self) -> None:
        first, end = self._region.address, self._region.address + self._region.length
        for at in range(first, end, _STEP_BYTES):
            if self._stopped.is_set() or _advise(at, min(_STEP_BYTES, end - at), _COLLAPSE) == errno.EINVAL:
                return  # EINVAL: this kernel cannot collapse pages; other errors concern only these pages


def _advise(address: int, length: int, advice: int) -> int:
    """Call ``madvise`` for a range of memory; return 0, or the errno if the call fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice):
        return 0
    error = ctypes.get_errno()
    logger.debug("madvise %d of %d bytes: %s", advice, length, os.strerror(error))
    return error
