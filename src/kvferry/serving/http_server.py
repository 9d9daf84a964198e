"""The router's HTTP server: uvicorn with httptools' parser, and a limit for the size of headers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEADER_BYTES = 64 << 10


class Server(uvicorn.Server):
    """A uvicorn server that does not handle signals, so that the caller can handle them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # noqa: D102
        yield


class BoundedHttp(HttpToolsProtocol):
    """A connection of a client. It is closed if the headers of a request exceed 64 KiB.

    The parser of httptools itself accepts headers of any length.
    """

    _pending_bytes = 0
    _in_headers = False

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and close the connection if headers stay incomplete beyond the limit."""
        super().data_received(data)
        if not self._in_headers:
            return
        self._pending_bytes += len(data)
        if self._pending_bytes > _MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("The headers of the request are too long.")

    def on_message_begin(self) -> None:  # noqa: D102
        self._in_headers, self._pending_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start the request.

        Raises:
            ValueError: the headers exceed the limit. The parser turns this into an error of its own.
        """
        self._in_headers = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > _MAX_HEADER_BYTES:
            raise ValueError("headers are too long")
        super().on_headers_complete()
