"""Run the router's web server in the foreground."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
from collections.abc import Callable

import uvicorn

from kvferry.operating_system import is_linux
from kvferry.serving.http_server import BoundedHttp, Server
from kvferry.serving.router.app import RouterApp

_new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    import uvloop
except ImportError:  # there is no uvloop for Windows
    _new_event_loop = asyncio.new_event_loop
else:
    _new_event_loop = uvloop.new_event_loop

_M_MMAP_THRESHOLD = -3
"""Number of the parameter in ``mallopt(3)``."""
_THRESHOLD_BYTES = 128 << 10

_TICK_SECONDS = 0.2
_DRAIN_SECONDS = 2.0
# Seconds that connections have to close after that.
_CUT_SECONDS = 2
# Seconds that the connection of a client stays open without a request. Load balancers keep theirs for up to a
# minute by default (nginx, AWS), and answer 502 if the router closes one just as they send a request on it.
_IDLE_SECONDS = 75


def run_app(
    app: RouterApp, sock: socket.socket, keep_on: Callable[[], bool], drain_seconds: float = _DRAIN_SECONDS
) -> None:
    """Serve `app` on a listening socket as long as `keep_on` returns True. Then drain it.

    Args:
        app: router application.
        sock: listening socket; closed when the function returns.
        keep_on: function that is called five times a second, in a thread, and returns whether to continue. If
            it raises an exception, the server stops, and the exception is raised again.
        drain_seconds: time that requests under way have to end when the server stops, in seconds. Requests
            that take longer end with an error.

    Raises:
        KeyboardInterrupt: a second signal was received. Requests under way were cut.
    """
    map_large_allocations()
    config = uvicorn.Config(
        app,
        log_level="warning",
        http=BoundedHttp,
        ws="none",
        use_colors=False,  # otherwise uvicorn queries standard output, which may be closed
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_CUT_SECONDS,
    )
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        try:
            runner.run(_serve(app, Server(config), sock, keep_on, drain_seconds))
        except KeyboardInterrupt:
            # uvicorn would log a traceback of each request that ends here.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            raise


async def _serve(
    app: RouterApp, server: Server, sock: socket.socket, keep_on: Callable[[], bool], drain_seconds: float
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        # Poll, because the processes and signals that `keep_on` checks set no event. In a
        # thread, because it may wait for an engine.
        while not serving.done() and await asyncio.to_thread(keep_on):  # noqa: ASYNC110
            await asyncio.sleep(_TICK_SECONDS)
        if not serving.done():
            await app.drain(drain_seconds)
    finally:
        server.should_exit = True
        app.end_answers()
        await serving


def map_large_allocations() -> None:
    """Make glibc map allocations of 128 KiB or more separately, so that freed memory returns to the kernel.

    By default, glibc raises the threshold of 128 KiB when it frees a larger allocation. It may then allocate
    asyncio's read buffers (256 KiB) on the heap, and the heap cannot shrink while a small allocation above
    them is in use. With other C libraries the function does nothing.
    """
    if not is_linux():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
