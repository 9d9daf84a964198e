"""The HTTP server of the admin API. It runs in a thread of its own and touches no state of the connector.

Every request needs the token that derives from the engines' secret (`transport.security.admin_token`). The
server checks it before it reads the body. One client is served at a time, and dropped if it is silent or
takes too long to send its request. So a stranger can delay other clients, but not the engine.
"""

from __future__ import annotations

import hmac
import logging
import re
import socket
import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec

from kvferry.connector.admin.actions import AdminActions
from kvferry.connector.admin.calls import AdminCalls
from kvferry.errors import ConfigError, KVFerryError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
PREFIX = "/v1/"
_READ_SECONDS = 3.0
"""Longest time to wait for the next bytes of a request."""
_REQUEST_SECONDS = 5.0
"""Longest time to read a whole request."""
_STEP_SECONDS = 10.0
"""Longest time to wait for a step of the engine. A step with a long prompt takes seconds."""
_POLL_SECONDS = 0.2
"""Longest time until the thread notices that the server closes."""


class AdminServer:
    """Serves the admin API until `close`.

    Attributes:
        port: port that the server listens on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        actions: AdminActions,
        calls: AdminCalls,
        *,
        request_seconds: float = _REQUEST_SECONDS,
        step_seconds: float = _STEP_SECONDS,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        """Listen, and start the server's thread.

        Args:
            host: address to listen on.
            port: port to listen on; 0 for any free port.
            token: token that every request must carry.
            actions: calls of the API.
            calls: queue to the engine's thread.
            request_seconds: longest time to read a whole request.
            step_seconds: longest time to wait for a step of the engine.
            poll_seconds: longest time until `close` stops to listen.

        Raises:
            ConfigError: the server cannot listen there.
        """

        class Handler(_Handler):
            pass

        Handler.token, Handler.actions, Handler.calls = token, actions, calls
        Handler.request_seconds, Handler.step_seconds = request_seconds, step_seconds
        try:
            self._server = _Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"admin: cannot listen on {host} port {port}: {error}; set admin.port to a free port"
            ) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(poll_seconds,), name="kvferry-admin", daemon=True
        )
        self._thread.start()
        logger.info("admin API on %s port %d", host, self.port)

    def close(self) -> None:
        """Cut the current client, stop listening, and end the thread. Close the queue of calls first."""
        self._server.cut()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(HTTPServer):
    """An HTTP server for IPv4 and IPv6 addresses that logs no request."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._client: socket.socket | None = None
        self._closing = False
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without a look-up of the machine's name, which may take seconds."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve one client, unless the server closes."""
        self._client = request
        if self._closing:
            self.cut()
        super().process_request(request, client_address)

    def cut(self) -> None:
        """End the connection of the current client. A client that sends slowly would hold up `close`."""
        self._closing = True
        if (client := self._client) is not None:
            with suppress(OSError):  # it has ended
                client.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or are too slow."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    token: str
    actions: AdminActions
    calls: AdminCalls
    request_seconds: float
    step_seconds: float
    timeout = _READ_SECONDS
    server_version, sys_version = "kvferry", ""

    def setup(self) -> None:
        """Limit the time to read the request."""
        super().setup()
        self._limit = threading.Timer(self.request_seconds, self._stop_reading)
        self._limit.daemon = True
        self._limit.start()

    def finish(self) -> None:
        """End the limit."""
        self._limit.cancel()
        super().finish()

    def _stop_reading(self) -> None:
        with suppress(OSError):  # it has ended
            self.connection.shutdown(socket.SHUT_RD)  # an answer can still be sent

    def do_GET(self) -> None:
        """Answer `status`; refuse other calls, because they need a body or change something."""
        self._answer(read_body=False)

    def do_POST(self) -> None:
        """Answer a call with a JSON body."""
        self._answer(read_body=True)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        """Log nothing: paths and bodies are a client's text."""

    def _answer(self, *, read_body: bool) -> None:
        given = self.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            self._send(HTTPStatus.UNAUTHORIZED, {"error": "a token of this engine's key is needed"})
            return
        if not read_body and self.path != PREFIX + "status":
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "use POST; GET is for status only"})
            return
        try:
            body = self._body() if read_body else b""
            call = self.actions.prepare(self.path.removeprefix(PREFIX), body)
        except KeyError:
            self._send(HTTPStatus.NOT_FOUND, {"error": "there is no such call"})
            return
        except KVFerryError as error:
            self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})
            return
        try:
            answer = self.calls.execute(call, self.step_seconds)
        except CancelledError:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "the engine stops"})
        except TimeoutError:
            self._send(
                HTTPStatus.SERVICE_UNAVAILABLE, {"error": f"no engine step in {self.step_seconds:g} s"}
            )
        except KVFerryError as error:
            self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except Exception:
            logger.exception("admin API: a call failed; tell kvferry's authors")
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "the call failed; see the engine's log"})
        else:
            self._send(HTTPStatus.OK, answer)

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > MAX_BODY_BYTES:
            raise ConfigError(f"a body needs a Content-Length of at most {MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(length))

    def _send(self, status: HTTPStatus, answer: Any) -> None:
        body = msgspec.json.encode(answer)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
