"""Large pages for host memory that is moved and copied.

A transport that copies from process to process pins what it copies page by page: with pages of 4 KiB that
takes about five times as long as with pages of 2 MiB. Where the kernel gives large pages only to who asks for
them (``/sys/kernel/mm/transparent_hugepage/enabled`` says ``madvise``), torch does not ask. Shared memory has
none by itself where ``shmem_enabled`` says ``never``, as it does by default; it can be copied to them
(``MADV_COLLAPSE``, which heeds neither setting), if it is mapped where a large page may begin.
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
"""MAP_FIXED: exactly there, over what was there before; MAP_NORESERVE: addresses alone."""
_HUGEPAGE, _COLLAPSE = 14, 25
"""MADV_HUGEPAGE: pages that are touched from now on; MADV_COLLAPSE, since Linux 6.1: those that were."""
_PAGE, _LARGE_PAGE = 4096, 2 << 20
_STEP_BYTES = 32 << 20

COLLAPSE_BYTES = 8 << 30
"""Touched memory beyond this stays as it is: copying it would hold up an engine's start for minutes."""


def request_huge_pages(region: Region, *, touched: bool) -> None:
    """Ask the kernel to back this memory with huge pages; a refusal changes nothing.

    Args:
        region: anywhere; only whole pages of the host's memory are meant.
        touched: it has been used already: up to `COLLAPSE_BYTES`, what is there is copied to large pages
            now, which takes about as long as writing it took.
    """
    first = -(-region.address // _PAGE) * _PAGE
    length = (region.address + region.length - first) // _PAGE * _PAGE
    if region.memory != "DRAM" or os.uname().sysname != "Linux":
        return
    for advice in (_HUGEPAGE, _COLLAPSE) if touched and length <= COLLAPSE_BYTES else (_HUGEPAGE,):
        _advise(first, length, advice)


def map_shared(fd: int, size: int) -> tuple[mmap.mmap, int]:
    """Map a file of shared memory where a large page may begin.

    Args:
        fd: of the file.
        size: bytes, of all of it.

    Returns:
        A mapping, and from which byte of it on the file lies there; closing it unmaps the file.

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
            region: mapped until `stop`; what has not been touched stays as it is.
        """
        self._region, self._stopped = region, threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-pages", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; afterwards the memory may be unmapped."""
        self._stopped.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait until all memory that can be collapsed is."""
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
