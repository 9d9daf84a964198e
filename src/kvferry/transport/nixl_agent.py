"""Create a NIXL agent whose progress thread sleeps until an event arrives.

NIXL's Python API starts this thread with a waiting time of zero, and has no option to change it. So the
thread spins: it takes a core and contends with every READ. On two cores, reading 256 MiB in descriptors of
64 KiB took 72 ms with a spinning thread, and 26 ms with a sleeping one. The bindings below that API accept a
waiting time.

NIXL 1.5.1 contains its own libibverbs and libnl, but its module for EFA also links those of the system. If
that module loads the system's libnl-route, it binds to functions of NIXL's copy, and the process crashes at
exit (SIGSEGV in ``rtnl_tc_unregister``, seen with Debian's rdma-core 44.0). If the system's libraries are
loaded before NIXL, each copy uses its own functions.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

logger = logging.getLogger(__name__)

# Maximum time that the progress thread sleeps. An event wakes the thread at once.
WAIT_MICROSECONDS = 10_000


# Library of the system that NIXL's EFA module links. It needs libibverbs, which needs libnl-route.
LIBRARY = "libefa.so.1"


@cache
def preload() -> bool:
    """Load the system's RDMA libraries, before NIXL is imported. Return whether the system has them."""
    try:
        ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError:
        return False
    return True


def nixl_package() -> str:
    """Return the package that implements NIXL here, such as ``nixl_cu12``, or raise ImportError."""
    preload()
    from nixl import _api  # noqa: PLC0415 - heavy, and may be missing

    return str(_api.nixl_agent.__module__).rpartition(".")[0]


def sleeping_bindings(bindings: Any) -> Any:
    """Return NIXL's bindings, changed so that progress threads of agents made with them sleep while idle."""

    class _SleepingConfig(bindings.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, field: str, value: Any) -> None:
            super().__setattr__(field, WAIT_MICROSECONDS if field == "pthrDelay" else value)

    return SimpleNamespace(**{**vars(bindings), "nixlAgentConfig": _SleepingConfig})


def make_nixl_agent(name: str, backends: list[str], *, progress: bool) -> Any:
    """Create a ``nixl_agent`` whose progress thread, if any, sleeps while idle, or raise ImportError."""
    preload()
    from nixl import _api  # noqa: PLC0415 - heavy, and may be missing

    # Run the same constructor with other globals, so that other users of NIXL in this process are unaffected.
    others = {**vars(_api), "nixlBind": sleeping_bindings(_api.nixlBind)}
    make = FunctionType(_api.nixl_agent.__init__.__code__, others)
    agent = _api.nixl_agent.__new__(_api.nixl_agent)
    config = _api.nixl_agent_config(enable_prog_thread=progress, backends=backends)
    try:
        make(agent, name, config, False)  # noqa: FBT003
    except (AttributeError, TypeError) as error:
        logger.warning(
            "this NIXL differs from 1.5.1 (%s), so its progress thread takes a core; install nixl 1.5.1",
            error,
        )
        return _api.nixl_agent(name, config)
    return agent
