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
"""Number of the parameter in ``mallopt(3)``."""
_THRESHOLD_BYTES = 128 << 10

_TICK_SECONDS = 0.2
# Seconds that answers under way have to complete when the server stops, and then to send an error.
_DRAIN_SECONDS = 2
_CUT_SECONDS = 2

_MAX_HEADER_BYTES = 64 << 10


class _Server(uvicorn.Server):
    """A uvicorn server that does not handle signals, so that the caller can handle them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_app(app: RouterApp, sock: socket.socket, keep_on: Callable[[], bool]) -> None:
    """Serve `app` on a listening socket as long as `keep_on` returns True.

    Args:
        app: router application.
        sock: listening socket; closed when the function returns.
        keep_on: function that is called five times a second, in a thread, and returns whether to continue. If
            it raises an exception, the server stops, and the exception is raised again.
    """
    map_large_allocations()
    config = uvicorn.Config(
        app,
        log_level="warning",
        http="h11",  # httptools, the default if it is installed, accepts headers of any length
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        use_colors=False,  # otherwise uvicorn queries standard output, which may be closed
        timeout_graceful_shutdown=_DRAIN_SECONDS + _CUT_SECONDS,
    )
    asyncio.run(_serve(app, _Server(config), sock, keep_on))


async def _serve(app: RouterApp, server: _Server, sock: socket.socket, keep_on: Callable[[], bool]) -> None:
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        # Poll, because the processes and signals that `keep_on` checks set no event. In a
        # thread, because it may wait for an engine.
        while not serving.done() and await asyncio.to_thread(keep_on):  # noqa: ASYNC110
            await asyncio.sleep(_TICK_SECONDS)
    finally:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=_DRAIN_SECONDS)
        app.end_answers()
        await serving


def map_large_allocations() -> None:
    """Make glibc map allocations of 128 KiB or more separately, so that freed memory returns to the kernel.

    By default, glibc raises the threshold of 128 KiB when it frees a larger allocation. It may then allocate
    asyncio's read buffers (256 KiB) on the heap, and the heap cannot shrink while a small allocation above
    them is in use. With other C libraries the function does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
