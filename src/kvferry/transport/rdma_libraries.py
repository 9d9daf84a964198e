"""Load the system's RDMA libraries before NIXL's, so that a process that used NIXL can exit.

NIXL 1.5.1 brings libibverbs and libnl of its own, but its module for EFA links the system's as well. Loaded
by that module, the system's libnl-route binds to functions of the other copy, and the process crashes at exit
(SIGSEGV in ``rtnl_tc_unregister``, seen with Debian's rdma-core 44.0). If the system's libraries are loaded
first, each copy uses its own functions.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

LIBRARY = "libefa.so.1"
"""The library that the module links; it needs libibverbs, which needs libnl-route."""


@cache
def preload() -> bool:
    """Load the system's libraries once; return whether they exist."""
    try:
        ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError:
        return False
    return True
