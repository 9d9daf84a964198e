"""Make a NIXL agent whose progress thread sleeps until an event arrives.

NIXL's Python API starts the thread with a waiting time of zero and cannot change it, so the thread spins: it
takes a core and contends with every READ. On two cores, 256 MiB in 64 KiB descriptors took 72 ms with it and
26 ms beside a thread that sleeps. The bindings below that API accept a waiting time.
"""

from __future__ import annotations

import logging
from types import FunctionType
from typing import Any

from kvferry.transport.rdma_libraries import preload

logger = logging.getLogger(__name__)

WAIT_MICROSECONDS = 10_000
"""Longest wait for an event; an event wakes the thread at once."""


def nixl_package() -> str:
    """Return the name of the package that NIXL chose for this machine.

    Raises:
        ImportError: NIXL cannot be imported.
    """
    preload()
    from nixl import _api  # noqa: PLC0415 - heavy, and may be missing

    return str(_api.nixl_agent.__module__).rpartition(".")[0]


def make_nixl_agent(name: str, backends: list[str], *, progress: bool) -> Any:
    """Return a ``nixl_agent`` whose progress thread sleeps; without that thread if not `progress`.

    Raises:
        ImportError: NIXL cannot be imported.
    """
    preload()
    from nixl import _api  # noqa: PLC0415 - heavy, and may be missing

    bindings = _api.nixlBind

    class Config(bindings.nixlAgentConfig):  # type: ignore[misc, name-defined]
        def __setattr__(self, field: str, value: Any) -> None:
            super().__setattr__(field, WAIT_MICROSECONDS if field == "pthrDelay" else value)

    class Bindings:
        nixlAgentConfig = Config  # noqa: N815 - NIXL's name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(bindings, attribute)

    # The same code over other globals: no other user of NIXL in this process is touched.
    make = FunctionType(_api.nixl_agent.__init__.__code__, {**vars(_api), "nixlBind": Bindings()})
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
