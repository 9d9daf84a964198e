"""Create a NIXL agent whose progress thread sleeps until an event arrives.

NIXL's Python API starts this thread with a waiting time of zero, and has no option to change it. So the
thread spins: it takes a core and contends with every READ. On two cores, reading 256 MiB in descriptors of
64 KiB took 72 ms with a spinning thread, and 26 ms with a sleeping one. The bindings below that API accept a
waiting time.
"""

from __future__ import annotations

import logging
from types import FunctionType
from typing import Any

from kvferry.transport.rdma_libraries import preload

logger = logging.getLogger(__name__)

WAIT_MICROSECONDS = 10_000
"""Maximum time that the progress thread sleeps. An event wakes the thread at once."""


def nixl_package() -> str:
    """Return the name of the Python package that implements NIXL on this machine, such as ``nixl_cu12``.

    The package ``nixl`` only selects one of several implementations.

    Raises:
        ImportError: NIXL cannot be imported.
    """
    preload()
    from nixl import _api  # noqa: PLC0415 - heavy, and may be missing

    return str(_api.nixl_agent.__module__).rpartition(".")[0]


def sleeping_bindings(bindings: Any) -> Any:
    """Return NIXL's bindings, changed so that progress threads of agents made with them sleep while idle.

    Args:
        bindings: module of the bindings, which is not changed.
    """

    class Config(bindings.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, field: str, value: Any) -> None:
            super().__setattr__(field, WAIT_MICROSECONDS if field == "pthrDelay" else value)

    class Bindings:
        nixlAgentConfig = Config  # noqa: N815 - NIXL's name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(bindings, attribute)

    return Bindings()


def make_nixl_agent(name: str, backends: list[str], *, progress: bool) -> Any:
    """Create a ``nixl_agent`` (endpoint of the NIXL library) whose progress thread sleeps while it is idle.

    Args:
        name: name of the agent.
        backends: names of NIXL backends.
        progress: True to run a progress thread.

    Raises:
        ImportError: NIXL cannot be imported.
    """
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
