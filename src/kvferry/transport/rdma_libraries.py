"""Load the system's RDMA libraries before NIXL's, so that the process does not crash at exit.

NIXL 1.5.1 contains its own libibverbs and libnl, but its module for EFA also links those of the system. If
that module loads the system's libnl-route, it binds to functions of NIXL's copy, and the process crashes at
exit (SIGSEGV in ``rtnl_tc_unregister``, seen with Debian's rdma-core 44.0). If the system's libraries are
loaded first, each copy uses its own functions.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

LIBRARY = "libefa.so.1"
"""Library of the system that NIXL's EFA module links. It needs libibverbs, which needs libnl-route."""


@cache
def preload() -> bool:
    """Load the system's RDMA libraries at the first call. Call this before NIXL is imported.

    Return whether the system has these libraries.
    """
    try:
        ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError:
        return False
    return True
