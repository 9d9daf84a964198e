"""Large pages for host memory that is moved.

A transport that copies from process to process pins what it copies page by page: with pages of 4 KiB that
takes about five times as long as with pages of 2 MiB. Where the kernel gives large pages only to who asks for
them (``/sys/kernel/mm/transparent_hugepage/enabled`` says ``madvise``), torch does not ask.
"""

from __future__ import annotations

import ctypes
import logging
import os

from kvferry.geometry import Region

logger = logging.getLogger(__name__)

_HUGEPAGE, _COLLAPSE = 14, 25
"""MADV_HUGEPAGE: pages that are touched from now on; MADV_COLLAPSE, since Linux 6.1: those that were."""
_PAGE = 4096

COLLAPSE_BYTES = 8 << 30
"""Touched memory beyond this stays as it is: copying it would hold up an engine's start for minutes."""


def ask_large_pages(region: Region, *, touched: bool) -> None:
    """Have the kernel keep this memory in large pages where it can; a wish, whose refusal changes nothing.

    Args:
        region: anywhere; only whole pages of the host's memory are meant.
        touched: it has been used already: up to `COLLAPSE_BYTES`, what is there is copied to large pages
            now, which takes about as long as writing it took.
    """
    first = -(-region.address // _PAGE) * _PAGE
    length = (region.address + region.length - first) // _PAGE * _PAGE
    if region.memory != "DRAM" or os.uname().sysname != "Linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for advice in (_HUGEPAGE, _COLLAPSE) if touched and length <= COLLAPSE_BYTES else (_HUGEPAGE,):
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice):
            logger.debug("madvise %d of %d bytes: %s", advice, length, os.strerror(ctypes.get_errno()))
