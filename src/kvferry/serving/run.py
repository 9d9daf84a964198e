"""Run the router's web server in the foreground."""

from __future__ import annotations

import asyncio
import ctypes
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from kvferry.serving.router import RouterApp

_M_MMAP_THRESHOLD = -3
"""Parameter of ``mallopt(3)``."""
_THRESHOLD_BYTES = 128 << 10

_TICK_SECONDS = 0.2
# For answers that are under way when the server is told to end: to be completed, and then to be cut short.
_DRAIN_SECONDS = 2
_CUT_SECONDS = 2

_MAX_HEADER_BYTES = 64 << 10


class _Server(uvicorn.Server):
    """A web server that leaves signals to its caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_app(app: RouterApp, sock: socket.socket, keep_on: Callable[[], bool]) -> None:
    """Serve `app` on a listening socket as long as `keep_on` returns True.

    Args:
        app: the application.
        sock: listening socket; closed at the end.
        keep_on: called five times a second; an exception also ends the server.
    """
    map_large_allocations()
    config = uvicorn.Config(
        app,
        log_level="warning",
        http="h11",  # httptools, where it is installed, takes headers of any length
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        use_colors=False,  # else it asks standard output, which may be closed
        timeout_graceful_shutdown=_DRAIN_SECONDS + _CUT_SECONDS,
    )
    asyncio.run(_serve(app, _Server(config), sock, keep_on))


async def _serve(app: RouterApp, server: _Server, sock: socket.socket, keep_on: Callable[[], bool]) -> None:
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        # Polled: what it looks at, processes and signals, sets no event.
        while not serving.done() and keep_on():  # noqa: ASYNC110
            await asyncio.sleep(_TICK_SECONDS)
    finally:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=_DRAIN_SECONDS)
        app.end_answers()
        await serving


def map_large_allocations() -> None:
    """Have glibc map allocations of 128 KiB or more separately, so that freeing them returns the memory.

    Otherwise glibc serves them from the heap after the first one was freed, and small allocations behind them
    keep the heap from shrinking. asyncio reads into buffers of 256 KiB. Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
