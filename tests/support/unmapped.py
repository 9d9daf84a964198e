"""Memory that goes and comes back at the same addresses, as that of a sleeping engine on a GPU."""

from __future__ import annotations

import ctypes
import mmap

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_FIXED = 0x10


def take_away(address: int, length: int) -> None:
    """Take the memory of all whole pages of a range away. Whoever touches it ends the process."""
    _map(address, length, 0)


def give_back(address: int, length: int) -> None:
    """Put new memory, all zeros, where `take_away` has taken some away."""
    _map(address, length, mmap.PROT_READ | mmap.PROT_WRITE)


def _map(address: int, length: int, rights: int) -> None:
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + length) // mmap.PAGESIZE * mmap.PAGESIZE
    assert begin < end, "not a page of it is whole"
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
    found = _LIBC.mmap(begin, end - begin, rights, flags, -1, 0)
    assert found == begin, ctypes.get_errno()
