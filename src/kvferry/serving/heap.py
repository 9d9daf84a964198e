"""The heap of a process that reads and writes pieces of all sizes for weeks."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
"""Of ``mallopt(3)``."""
_THRESHOLD_BYTES = 128 << 10


def map_large_pieces() -> None:
    """Have glibc map each piece of 128 KiB or more by itself, so that its memory goes back when it is freed.

    Otherwise glibc takes such pieces from the heap as soon as one was freed. Small pieces behind them keep
    the heap from shrinking, and asyncio reads into pieces of 256 KiB. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
