"""Keep the heap small in a process that reads and writes buffers of all sizes for weeks."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
"""Parameter of ``mallopt(3)``."""
_THRESHOLD_BYTES = 128 << 10


def map_large_allocations() -> None:
    """Have glibc map allocations of 128 KiB or more separately, so that freeing them returns the memory.

    Otherwise glibc serves them from the heap after the first one was freed, and small allocations behind them
    keep the heap from shrinking. asyncio reads into buffers of 256 KiB. Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
