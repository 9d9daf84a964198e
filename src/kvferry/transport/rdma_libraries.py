"""Load the system's RDMA libraries before NIXL's, so that a process that used NIXL can exit.

NIXL 1.5.1 brings libibverbs and libnl of its own, but its module for EFA links the system's as well. Loaded
by that module, the system's libnl-route takes functions of the other copy, and the process dies as it exits
(SIGSEGV in ``rtnl_tc_unregister``, seen with Debian's rdma-core 44.0). Loaded before, each keeps to itself.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

LIBRARY = "libefa.so.1"
"""What the module links; it needs libibverbs, which needs libnl-route."""


@cache
def preload() -> bool:
    """Load the system's libraries once; return whether it has them."""
    try:
        ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError:
        return False
    return True
