"""Run the router's web server in the foreground."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvferry.common.machine import has_posix, is_linux, resource
from kvferry.tools.serving.router.app import RouterApp

_new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    import uvloop
except ImportError:  # there is no uvloop for Windows
    _new_event_loop = asyncio.new_event_loop
else:
    _new_event_loop = uvloop.new_event_loop

_MAX_HEADER_BYTES = 64 << 10
_FRAMING = (b"content-length", b"transfer-encoding")

_TICK_SECONDS = 0.2
_DRAIN_SECONDS = 2.0
# Seconds that connections have to close after that.
_CUT_SECONDS = 2
# Seconds that the connection of a client stays open without a request. Load balancers keep theirs for up to a
# minute by default (nginx, AWS), and answer 502 if the router closes one just as they send a request on it.
_IDLE_SECONDS = 75

# A request under way takes two or three descriptors, and the soft limit is often 1,024.
_MOST_FILES = 1 << 16
# Number of the parameter in ``mallopt(3)``.
_M_MMAP_THRESHOLD = -3
_THRESHOLD_BYTES = 128 << 10


class _Server(uvicorn.Server):
    """A uvicorn server that does not handle signals, so that the caller can handle them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _BoundedHttp(HttpToolsProtocol):
    """A connection of a client. It is closed if the headers or the trailers of a request exceed 64 KiB.

    A request to change the protocol (``Upgrade``, or the method CONNECT) is answered like any other.
    """

    # httptools accepts headers and trailers of any length. So the bytes are counted since it last found the
    # end of headers, a part of a body, or the end of one.
    _pending_bytes = 0
    _in_headers = False
    _replaying = False

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while rest:
                rest = self._parse(rest)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")

    def _parse(self, data: memoryview) -> memoryview:
        """Parse bytes up to the headers of a request to change the protocol. Return the bytes after them."""
        self._pending_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade()
            return data[upgrade.args[0] :]
        if self._pending_bytes > _MAX_HEADER_BYTES:
            self.send_400_response("The headers of the request are too long.")
        return data[:0]

    def _decline_upgrade(self) -> None:
        # The parser would skip the body, and read it as the next request. A new one first reads headers that
        # only say where the body ends.
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        framing = [b"%s: %s\r\n" % header for header in self.headers if header[0] in _FRAMING]
        self._replaying = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
        self._replaying = False

    def on_message_begin(self) -> None:
        if not self._replaying:
            self._in_headers = True
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._in_headers:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # A trailer, a field after a chunked body, is dropped. uvicorn would add it to the request's headers.
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request.

        Raises:
            ValueError: the headers exceed the limit. The parser turns this into an error of its own.
        """
        if not self._in_headers:
            return
        self._in_headers, self._pending_bytes = False, 0
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > _MAX_HEADER_BYTES:
            raise ValueError("headers are too long")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._pending_bytes = 0
        # The parser says so too soon of a request to change the protocol: it has skipped the body, which the
        # new parser reads.
        if not self.parser.should_upgrade():
            super().on_message_complete()


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
    _map_large_allocations()
    raise_file_limit()
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        try:
            runner.run(_serve(app, sock, keep_on, drain_seconds, is_urgent))
        except KeyboardInterrupt:
            # uvicorn would log a traceback of each request that ends here.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            raise


def server_config(app: RouterApp) -> uvicorn.Config:
    """Return the configuration of the web server that serves `app`."""
    return uvicorn.Config(
        app,
        log_level="warning",
        http=_BoundedHttp,
        ws="none",
        use_colors=False,  # otherwise uvicorn queries standard output, which may be closed
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_CUT_SECONDS,
    )


async def _serve(
    app: RouterApp,
    sock: socket.socket,
    keep_on: Callable[[], bool],
    drain_seconds: float,
    is_urgent: Callable[[], bool],
) -> None:
    server = _Server(server_config(app))
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


def _map_large_allocations() -> None:
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
