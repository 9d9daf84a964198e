"""The router's HTTP server: uvicorn with httptools' parser, limits for headers, and no other protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEADER_BYTES = 64 << 10
_FRAMING = (b"content-length", b"transfer-encoding")


class Server(uvicorn.Server):
    """A uvicorn server that does not handle signals, so that the caller can handle them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class BoundedHttp(HttpToolsProtocol):
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
