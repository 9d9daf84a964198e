"""A NIXL agent whose progress thread sleeps until something happens.

That thread waits for events of the transport, but NIXL's Python API lets it wait for no time at all and
offers no other choice: it spins. An engine then loses a core for as long as it runs, and every READ
contends with it: on two cores, 256 MiB in 64 KiB descriptors took 72 ms so and 26 ms beside a thread that
sleeps. The bindings below that API do take the time.
"""

from __future__ import annotations

import logging
from types import FunctionType
from typing import Any

from kvferry.transport.rdma_libraries import preload

logger = logging.getLogger(__name__)

WAIT_MICROSECONDS = 10_000
"""How long the thread waits for an event before it looks anyway; an event wakes it at once."""


def nixl_package() -> str:
    """Return the name of the package that NIXL chose for this machine.

    Raises:
        ImportError: NIXL cannot be imported.
    """
    preload()
    from nixl import _api  # noqa: PLC0415 - heavy, and may be missing

    return str(_api.nixl_agent.__module__).rpartition(".")[0]


def make_nixl_agent(name: str, backends: list[str], *, progress: bool) -> Any:
    """What ``nixl_agent(name, nixl_agent_config(backends=backends))`` makes, with that wait, or no thread.

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
