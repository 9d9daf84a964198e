"""Huge pages for host memory that is transferred and copied.

A transport that copies between processes pins memory page by page: with pages of 4 KiB that takes about five
times as long as with pages of 2 MiB. If ``/sys/kernel/mm/transparent_hugepage/enabled`` is ``madvise``, a
process must request huge pages, which torch does not. If ``shmem_enabled`` is ``never``, the default, shared
memory has none; but ``MADV_COLLAPSE``, which ignores both settings, can copy it to huge pages if it is mapped
at a multiple of their size.
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

_FIXED, _NORESERVE = 0x10, 0x4000
"""MAP_FIXED replaces an existing mapping at the address. MAP_NORESERVE reserves addresses only."""
_HUGEPAGE, _COLLAPSE = 14, 25
"""MADV_HUGEPAGE applies to pages touched later, MADV_COLLAPSE (since Linux 6.1) to touched pages."""
_PAGE, _LARGE_PAGE = 4096, 2 << 20
_STEP_BYTES = 32 << 20

COLLAPSE_BYTES = 8 << 30
"""Maximum bytes of touched memory to collapse: more would delay an engine's start for minutes."""


def request_huge_pages(region: Region, *, touched: bool) -> None:
    """Ask the kernel to back this memory with huge pages; a refusal changes nothing.

    Args:
        region: any region; only whole pages of host memory are affected.
        touched: the memory is in use. Then up to `COLLAPSE_BYTES` are copied to huge pages now, which takes
            about as long as writing them.
    """
    first = -(-region.address // _PAGE) * _PAGE
    length = (region.address + region.length - first) // _PAGE * _PAGE
    if region.memory != "DRAM" or os.uname().sysname != "Linux":
        return
    for advice in (_HUGEPAGE, _COLLAPSE) if touched and length <= COLLAPSE_BYTES else (_HUGEPAGE,):
        _advise(first, length, advice)


def map_shared(fd: int, size: int) -> tuple[mmap.mmap, int]:
    """Map a file of shared memory so that it is aligned to huge pages.

    Args:
        fd: descriptor of the file.
        size: bytes of the file.

    Returns:
        The mapping, and the offset of the file in it. Closing the mapping unmaps the file.

    Raises:
        OSError: it cannot be mapped.
    """
    room = mmap.mmap(-1, size + _LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    skip = -address % _LARGE_PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    there = libc.mmap(
        ctypes.c_void_p(address + skip),
        ctypes.c_size_t(size),
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | _FIXED,
        fd,
        ctypes.c_long(0),
    )
    if there != address + skip:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return room, skip


class HugePageCollapser:
    """A thread that collapses memory in use into huge pages, which takes seconds per GiB."""

    def __init__(self, region: Region) -> None:
        """Start the thread.

        Args:
            region: memory that stays mapped until `stop`; untouched pages are skipped.
        """
        self._region, self._stopped = region, threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-pages", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. After that the memory may be unmapped."""
        self._stopped.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait until the thread has collapsed all memory that can be collapsed."""
        self._thread.join()

    def _run(self) -> None:
        first, end = self._region.address, self._region.address + self._region.length
        for at in range(first, end, _STEP_BYTES):
            if self._stopped.is_set() or _advise(at, min(_STEP_BYTES, end - at), _COLLAPSE) == errno.EINVAL:
                return  # the kernel cannot; what it says otherwise is of these pages only


def _advise(address: int, length: int, advice: int) -> int:
    """Call madvise; return 0 or its errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice):
        return 0
    error = ctypes.get_errno()
    logger.debug("madvise %d of %d bytes: %s", advice, length, os.strerror(error))
    return error
