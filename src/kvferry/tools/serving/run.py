"""Run the router's web server in the foreground."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
from collections.abc import Callable
from contextlib import suppress

import uvicorn

from kvferry.operating_system import has_posix, is_linux, resource
from kvferry.tools.serving.http_server import BoundedHttp, Server
from kvferry.tools.serving.router.app import RouterApp

_new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    import uvloop
except ImportError:  # there is no uvloop for Windows
    _new_event_loop = asyncio.new_event_loop
else:
    _new_event_loop = uvloop.new_event_loop

# Number of the parameter in ``mallopt(3)``.
_M_MMAP_THRESHOLD = -3
_THRESHOLD_BYTES = 128 << 10

# A request under way takes two or three descriptors, and the soft limit is often 1,024.
_MOST_FILES = 1 << 16

_TICK_SECONDS = 0.2
_DRAIN_SECONDS = 2.0
# Seconds that connections have to close after that.
_CUT_SECONDS = 2
# Seconds that the connection of a client stays open without a request. Load balancers keep theirs for up to a
# minute by default (nginx, AWS), and answer 502 if the router closes one just as they send a request on it.
_IDLE_SECONDS = 75


def run_app(
    app: RouterApp,
    sock: socket.socket,
    keep_on: Callable[[], bool],
    drain_seconds: float = _DRAIN_SECONDS,
    *,
    is_urgent: Callable[[], bool] = lambda: False,
) -> None:
    """Serve `app` on a listening socket as long as `keep_on` returns True. Then drain it.

    Args:
        sock: listening socket; closed when the function returns.
        keep_on: function that is called five times a second, in a thread. If it raises an exception, the
            server stops, and the exception is raised again.
        drain_seconds: time that requests under way have to end when the server stops. Requests that take
            longer end with an error.
        is_urgent: function that is called five times a second during this time. If it returns True, requests
            under way are cut.

    Raises:
        KeyboardInterrupt: requests under way were cut because of a second signal.
    """
    map_large_allocations()
    raise_file_limit()
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        try:
            runner.run(_serve(app, Server(server_config(app)), sock, keep_on, drain_seconds, is_urgent))
        except KeyboardInterrupt:
            # uvicorn would log a traceback of each request that ends here.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            raise


def server_config(app: RouterApp) -> uvicorn.Config:
    """Return the configuration of the web server that serves `app`."""
    return uvicorn.Config(
        app,
        log_level="warning",
        http=BoundedHttp,
        ws="none",
        use_colors=False,  # otherwise uvicorn queries standard output, which may be closed
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_CUT_SECONDS,
    )


async def _serve(
    app: RouterApp,
    server: Server,
    sock: socket.socket,
    keep_on: Callable[[], bool],
    drain_seconds: float,
    is_urgent: Callable[[], bool],
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        # Poll, because the processes and signals that `keep_on` checks set no event. In a
        # thread, because it may wait for an engine.
        while not serving.done() and await asyncio.to_thread(keep_on):  # noqa: ASYNC110
            await asyncio.sleep(_TICK_SECONDS)
        if not serving.done():
            await _drain(app, drain_seconds, is_urgent)
    finally:
        server.should_exit = True
        app.end_answers()
        await serving


async def _drain(app: RouterApp, seconds: float, is_urgent: Callable[[], bool]) -> None:
    draining = asyncio.create_task(app.drain(seconds))
    while not draining.done():
        # A signal's KeyboardInterrupt is lost if it is raised in a request's task: uvicorn only logs it.
        if is_urgent():
            raise KeyboardInterrupt
        await asyncio.wait([draining], timeout=_TICK_SECONDS)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to `_MOST_FILES`, as far as the hard limit allows."""
    if not has_posix():
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS has a lower limit beside the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def map_large_allocations() -> None:
    """Make glibc map allocations of 128 KiB or more separately, so that freed memory returns to the kernel.

    With other C libraries the function does nothing.
    """
    if not is_linux():
        return
    # By default, glibc raises the threshold of 128 KiB when it frees a larger allocation. It may then
    # allocate asyncio's read buffers (256 KiB) on the heap, and the heap cannot shrink while a small
    # allocation above them is in use.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
