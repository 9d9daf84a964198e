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
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Protocol, TypeAlias

import msgspec

from kvferry.common.errors import ConfigError, KVFerryError
from kvferry.connector.engine import PlainRequest
from kvferry.connector.tiers.tiering import Tiering

DRAINED = "an operator drains this engine"


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt of the base model, without images.

    Attributes:
        tokens: token ids.
        salt: ``cache_salt`` of its requests; None without one.
        name: name of the pin; only for ``pin``.
    """

    tokens: list[int]
    salt: str | None = None
    name: str = ""


class Name(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a pin."""

    name: str


class Drop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to drop.

    Attributes:
        salt: ``cache_salt`` whose chunks this engine must not find again, in any tier; None for all chunks in
            host memory, whatever their salt.
    """

    salt: str | None = None


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty body."""


class Drainable(Protocol):
    """The part of the scheduler half that exchanges KV with other engines."""

    def drain(self) -> None:
        """Offer no KV and read no KV of other engines from now on. Leases and loads under way go on."""
        ...

    def drain_state(self) -> dict[str, Any]:
        """Return ``draining``, ``leases``, ``loads``."""
        ...


class AdminActions:
    """Executes the calls of the admin API. Only the engine's thread calls the methods."""

    def __init__(self, engine: Drainable, tiering: Tiering | None, longest_prompt: int) -> None:
        """Create the actions of one engine.

        Args:
            tiering: the engine's tiers; None if it has none.
            longest_prompt: maximum number of tokens of a prompt.
        """
        self._engine, self._tiering, self._longest = engine, tiering, longest_prompt
        self._calls: Mapping[str, tuple[type[Any], Callable[[Any], Any]]] = {
            "status": (Nothing, lambda _: self._status()),
            "lookup": (Prompt, self._look_up),
            "pin": (Prompt, self._pin),
            "unpin": (Name, self._unpin),
            "drop": (Drop, self._drop),
            "drain": (Nothing, lambda _: self._drain()),
        }

    def prepare(self, name: str, body: bytes) -> Callable[[], Any]:
        """Return the call of a name and JSON body, for the engine's thread. Any thread may prepare one.

        Args:
            body: body of the HTTP request; empty stands for an empty object.

        Raises:
            KeyError: there is no call of this name.
            ConfigError: the body does not fit the call.
        """
        schema, action = self._calls[name]
        try:
            value = msgspec.json.decode(body or b"{}", type=schema)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"the body of {name} does not fit: {error}") from error
        return lambda: action(value)

    def _status(self) -> dict[str, Any]:
        state = self._engine.drain_state()
        owed = self._tiering.owed_chunks if self._tiering is not None else 0
        drained = state["draining"] and not (state["leases"] or state["loads"] or owed)
        return {**state, "owed_chunks": owed, "drained": bool(drained)}

    def _drain(self) -> dict[str, Any]:
        self._engine.drain()
        return self._status()

    def _look_up(self, prompt: Prompt) -> dict[str, Any]:
        found = self._tiers().look_up(self._request(prompt))
        return {"tokens": len(prompt.tokens), "tiers": found}

    def _pin(self, prompt: Prompt) -> dict[str, Any]:
        if not prompt.name:
            raise ConfigError("a pin needs a name, by which it is removed again")
        chunks, in_host, pinned = self._tiers().pin(prompt.name, self._request(prompt))
        return {"chunks": chunks, "host_chunks": in_host, "pinned_chunks": pinned}

    def _unpin(self, pin: Name) -> dict[str, Any]:
        return {"unpinned_chunks": self._tiers().unpin(pin.name)}

    def _drop(self, drop: Drop) -> dict[str, Any]:
        if drop.salt is None:
            return {"dropped_chunks": self._tiers().drop_host_memory()}
        self._tiers().forget_salt(drop.salt)
        return {}

    def _tiers(self) -> Tiering:
        if self._tiering is None:
            raise ConfigError("this engine has no tiers; give it some with the setting tiers")
        return self._tiering

    def _request(self, prompt: Prompt) -> PlainRequest:
        if not 0 < len(prompt.tokens) <= self._longest:
            raise ConfigError(
                f"the prompt has {len(prompt.tokens)} tokens; this engine takes 1 to {self._longest}"
            )
        return PlainRequest(request_id="admin", prompt_token_ids=prompt.tokens, cache_salt=prompt.salt)


Call: TypeAlias = Callable[[], Any]


class AdminCalls:
    """A queue of calls from one thread to the engine's thread. Thread-safe."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Create an empty queue."""
        self._wake = wake
        self._queue: deque[tuple[Call, Future[Any]]] = deque()
        self._closed = False

    def __len__(self) -> int:
        """Return the number of calls that the engine's thread has not executed yet."""
        return len(self._queue)

    def execute(self, call: Call, seconds: float) -> Any:
        """Have the engine's thread execute a call, and return its result.

        Raises:
            TimeoutError: the engine has not run a step in this time. The call is then not executed later.
            CancelledError: the engine stops, and does not execute the call.
            Exception: the exception that the call raised.
        """
        future: Future[Any] = Future()
        self._queue.append((call, future))
        if self._closed:
            future.cancel()
        self._wake()
        try:
            return future.result(seconds)
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel all waiting calls and all later ones, because the engine runs no more steps."""
        self._closed = True
        for _, future in tuple(self._queue):
            future.cancel()

    def run(self) -> None:
        """Execute all waiting calls. The engine's thread calls this in a step."""
        while self._queue:
            call, future = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - passed to the caller
                future.set_exception(error)


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
            port: port to listen on; 0 for any free port.

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
