"""The admin API: an HTTP server in a thread of its own, whose calls the engine's thread executes.

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
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Protocol, TypeAlias

import msgspec

from kvferry.common.errors import ConfigError, KVFerryError
from kvferry.common.threads import Thread
from kvferry.connector.engine import PlainRequest
from kvferry.connector.tiers.tiering import Tiering

logger = logging.getLogger(__name__)

DRAINED = "an operator drains this engine"

_PREFIX = "/v1/"
_MAX_BODY_BYTES = 16 << 20
# Longest times to wait for the next bytes of a request, and to read a whole one.
_READ_SECONDS = 3.0
_REQUEST_SECONDS = 5.0
# Longest time to wait for a step of the engine. A step with a long prompt takes seconds.
_STEP_SECONDS = 10.0
# Longest time until the thread notices that the server closes.
_POLL_SECONDS = 0.2

_Call: TypeAlias = Callable[[], Any]


class _Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt of the base model, without images.

    `salt` is the ``cache_salt`` of its requests, and `name` the name of the pin, only for ``pin``.
    """

    tokens: list[int]
    salt: str | None = None
    name: str = ""


class _Name(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a pin."""

    name: str


class _Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A session by the ``session_id`` and the ``cache_salt`` of its requests."""

    session: str
    salt: str = ""


class _Prefetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prompt whose chunks to prefetch, or the session, whose last prompt and answer it is."""

    tokens: list[int] | None = None
    session: str | None = None
    salt: str | None = None


class _Drop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The chunks to drop: those of a ``cache_salt``, which this engine must not find again in any tier.

    If `salt` is None, all chunks in host memory, whatever their salt.
    """

    salt: str | None = None


class _Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty body."""


class _Drainable(Protocol):
    """The part of the scheduler half that exchanges KV with other engines."""

    def drain(self) -> None:
        """Offer no KV and read no KV of other engines any more. Leases and loads under way go on."""

    def drain_state(self) -> dict[str, Any]:
        """Return ``draining``, ``leases``, ``loads``."""


class AdminCalls:
    """The calls of the admin API, and the queue of those that the engine's thread is to execute in a step.

    Thread-safe.
    """

    def __init__(
        self, engine: _Drainable, tiering: Tiering | None, longest_prompt: int, wake: Callable[[], None]
    ) -> None:
        self._engine, self._tiering, self._longest, self._wake = engine, tiering, longest_prompt, wake
        self._queue: deque[tuple[_Call, Future[Any]]] = deque()
        self._closed = False
        self._actions: Mapping[str, tuple[type[Any], Callable[[Any], Any]]] = {
            "status": (_Nothing, lambda _: self._status()),
            "lookup": (_Prompt, self._look_up),
            "pin": (_Prompt, self._pin),
            "unpin": (_Name, self._unpin),
            "prefetch": (_Prefetch, self._prefetch),
            "end_session": (_Session, self._end_session),
            "drop": (_Drop, self._drop),
            "drain": (_Nothing, lambda _: self._drain()),
        }

    def prepare(self, name: str, body: bytes) -> _Call:
        """Return the call of a name and JSON body, of which an empty one stands for an empty object.

        Raises:
            KeyError: there is no call of this name.
            ConfigError: the body does not fit the call.
        """
        schema, action = self._actions[name]
        try:
            value = msgspec.json.decode(body or b"{}", type=schema)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"the body of {name} does not fit: {error}") from error
        return lambda: action(value)

    def __len__(self) -> int:
        return len(self._queue)

    def execute(self, call: _Call, seconds: float) -> Any:
        """Have the engine's thread execute a call, and return its result or raise its exception.

        Raises:
            TimeoutError: the engine has not run a step in this time. The call is then not executed later.
            CancelledError: the engine stops, and does not execute the call.
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

    def _status(self) -> dict[str, Any]:
        state = self._engine.drain_state()
        owed = self._tiering.owed_chunks if self._tiering is not None else 0
        drained = state["draining"] and not (state["leases"] or state["loads"] or owed)
        return {**state, "owed_chunks": owed, "drained": bool(drained)}

    def _drain(self) -> dict[str, Any]:
        self._engine.drain()
        return self._status()

    def _look_up(self, prompt: _Prompt) -> dict[str, Any]:
        found = self._tiers().look_up(self._request(prompt))
        return {"tokens": len(prompt.tokens), "tiers": found}

    def _pin(self, prompt: _Prompt) -> dict[str, Any]:
        if not prompt.name:
            raise ConfigError("a pin needs a name, by which it is removed again")
        chunks, in_host, pinned = self._tiers().pin(prompt.name, self._request(prompt))
        return {"chunks": chunks, "host_chunks": in_host, "pinned_chunks": pinned}

    def _unpin(self, pin: _Name) -> dict[str, Any]:
        return {"unpinned_chunks": self._tiers().unpin(pin.name)}

    def _prefetch(self, what: _Prefetch) -> dict[str, Any]:
        if (what.tokens is None) == (what.session is None):
            raise ConfigError("prefetch needs either tokens or a session")
        if what.tokens is not None:
            found, here = self._tiers().prefetch(self._request(_Prompt(what.tokens, what.salt)))
        else:
            found, here = self._tiers().prefetch_session((what.salt or "", what.session or ""))
        return {"chunks": found, "host_chunks": here}

    def _end_session(self, what: _Session) -> dict[str, Any]:
        return {"cold_chunks": self._tiers().end_session((what.salt, what.session))}

    def _drop(self, drop: _Drop) -> dict[str, Any]:
        if drop.salt is None:
            return {"dropped_chunks": self._tiers().drop_host_memory()}
        self._tiers().forget_salt(drop.salt)
        return {}

    def _tiers(self) -> Tiering:
        if self._tiering is None:
            raise ConfigError("this engine has no tiers; give it some with the setting tiers")
        return self._tiering

    def _request(self, prompt: _Prompt) -> PlainRequest:
        if not 0 < len(prompt.tokens) <= self._longest:
            raise ConfigError(
                f"the prompt has {len(prompt.tokens)} tokens; this engine takes 1 to {self._longest}"
            )
        return PlainRequest(request_id="admin", prompt_token_ids=prompt.tokens, cache_salt=prompt.salt)


class AdminServer:
    """Serves the admin API on `port` until `close`. Every engine step runs `calls`."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        calls: AdminCalls,
        *,
        request_seconds: float = _REQUEST_SECONDS,
        step_seconds: float = _STEP_SECONDS,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        """Listen, on any free port if `port` is 0, and start the server's thread.

        Raises:
            ConfigError: the server cannot listen there.
        """

        class Handler(_Handler):
            pass

        self.calls = calls
        Handler.token, Handler.calls = token, calls
        Handler.request_seconds, Handler.step_seconds = request_seconds, step_seconds
        try:
            self._server = _Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"admin: cannot listen on {host} port {port}: {error}; set admin.port to a free port"
            ) from error
        self.port = int(self._server.server_address[1])
        self._thread = Thread(partial(self._server.serve_forever, poll_seconds), "kvferry-admin")
        self._thread.start()
        logger.info("admin API on %s port %d", host, self.port)

    def close(self) -> None:
        """Cancel all calls, cut the current client, stop listening, and end the thread."""
        self.calls.close()
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
        # Without the base class's look-up of the machine's name, which may take seconds.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        self._client = request
        if self._closing:
            self.cut()
        super().process_request(request, client_address)

    def cut(self) -> None:
        """End the connection of the current client."""
        self._closing = True
        # A client that sends slowly would hold up the server's end.
        if (client := self._client) is not None:
            with suppress(OSError):  # it has ended
                client.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or are too slow."""


class _Handler(BaseHTTPRequestHandler):
    token: str
    calls: AdminCalls
    request_seconds: float
    step_seconds: float
    timeout = _READ_SECONDS
    server_version, sys_version = "kvferry", ""

    def setup(self) -> None:
        super().setup()
        # Ends clients that send their request slowly.
        self._limit = threading.Timer(self.request_seconds, self._stop_reading)
        self._limit.daemon = True
        self._limit.start()

    def finish(self) -> None:
        self._limit.cancel()
        super().finish()

    def _stop_reading(self) -> None:
        with suppress(OSError):  # it has ended
            self.connection.shutdown(socket.SHUT_RD)  # an answer can still be sent

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        """Log nothing: paths and bodies are a client's text."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        status, answer = self._execute()
        body = msgspec.json.encode(answer if status is HTTPStatus.OK else {"error": answer})
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _execute(self) -> tuple[HTTPStatus, Any]:
        """Execute the call of a request. Return its result, or the text of an error."""
        given = self.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            return HTTPStatus.UNAUTHORIZED, "a token of this engine's key is needed"
        if self.command == "GET" and self.path != _PREFIX + "status":
            # Other calls need a body or change something.
            return HTTPStatus.METHOD_NOT_ALLOWED, "use POST; GET is for status only"
        try:
            body = b"" if self.command == "GET" else self._body()
            call = self.calls.prepare(self.path.removeprefix(_PREFIX), body)
        except KeyError:
            return HTTPStatus.NOT_FOUND, "there is no such call"
        except KVFerryError as error:
            return HTTPStatus.BAD_REQUEST, str(error)
        try:
            status, answer = HTTPStatus.OK, self.calls.execute(call, self.step_seconds)
        except CancelledError:
            status, answer = HTTPStatus.SERVICE_UNAVAILABLE, "the engine stops"
        except TimeoutError:
            status, answer = HTTPStatus.SERVICE_UNAVAILABLE, f"no engine step in {self.step_seconds:g} s"
        except KVFerryError as error:
            status, answer = HTTPStatus.BAD_REQUEST, str(error)
        except Exception:
            logger.exception("admin API: a call failed; tell kvferry's authors")
            status, answer = HTTPStatus.INTERNAL_SERVER_ERROR, "the call failed; see the engine's log"
        return status, answer

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > _MAX_BODY_BYTES:
            raise ConfigError(f"a body needs a Content-Length of at most {_MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(length))
