"""The settings of a router: its engines and limits, and the keys of clients and engines."""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.common.errors import ConfigError
from kvferry.tools.fetch import server_url
from kvferry.tools.serving.router.replies import ApiError

_UNAUTHORIZED = ApiError(
    401, "the API key is missing or wrong", "invalid_api_key", ((b"www-authenticate", b"Bearer"),)
)
# Load balancers, Kubernetes and Prometheus ask these without a key.
_OPEN_PATHS = frozenset(("/health", "/load", "/metrics", "/ping"))
_AUTHORIZATION = b"authorization"
_BEARER = b"bearer "


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """The engines and limits of a router."""

    prefill: tuple[str, ...]  # base URLs of the prefill engines; empty if those of `decode` compute prompts
    decode: tuple[str, ...]  # base URLs of the other engines, at least one
    # Time without a good probe after which an engine is silent, in seconds. It is then down, and each request
    # that has got nothing from it for as long ends or is sent to another engine. Also the longest time to
    # connect.
    silent_seconds: float = 5.0
    # vLLM's server closes an idle connection after 5 seconds. A request that is sent just then fails.
    keep_connection_seconds: float = 2.0  # longest time that an idle connection to an engine is used again
    probe_seconds: float = 1.0
    max_body_bytes: int = 64 << 20
    # Keys of which clients must send one; none to serve everybody.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    # Key to send to engines instead of the client's; None to send no other.
    engine_key: str | None = field(default=None, repr=False)
    allowed_origins: tuple[str, ...] = ()  # origins whose web pages may use the router (CORS); ``*`` for all
    # File for `fleet.read_engines`, whose changes replace the engines; None to keep them.
    engines_file: Path | None = None
    # Least number of tokens of a prompt that goes to a prefill engine, apart from those that the decode
    # engine has already; 0 to send every prompt to a prefill engine.
    min_prefill_tokens: int = 0
    # True to continue the stream of a decode engine that fails at another one; False to end it with an error.
    continue_streams: bool = True
    # True to follow the KV events of engines that publish them.
    follow_events: bool = True
    # True to hand a short prompt over between engines that come up, so that they are connected before the
    # first request; False if they connect by themselves.
    introduce: bool = False
    # True to keep ``kv_transfer_params`` that clients send; False to remove them.
    trust_kv_params: bool = False
    # Function that returns monotonic seconds, for the time that engines rest.
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigError("the router has no decode engine; give at least one --decode URL")
        for role in ("prefill", "decode"):
            urls = tuple(_engine_url(role, text) for text in getattr(self, role))
            object.__setattr__(self, role, urls)


def engine_url(text: str) -> str | None:
    """Return the base URL of an engine, from a URL or from host and port; None if the text is neither.

    A name or password in it is refused: clients send their own keys, and the router may send one of its own.
    """
    url = server_url(text)
    return None if url is None or "@" in url or "?" in text or "#" in text else url


def _engine_url(role: str, text: str) -> str:
    if (url := engine_url(text)) is None:
        raise ConfigError(f"--{role} {text} is no address; give http://host:port or host:port")
    return url


def read_keys(path: Path | None, variable: str) -> tuple[str, ...]:
    """Return the keys in a file, one per line, or else the key in an environment variable; none if unset.

    Raises:
        ConfigError: the file cannot be read, or has no key, or a key is not plain ASCII.
    """
    if path is None:
        keys = [key] if (key := os.environ.get(variable, "").strip()) else []
    else:
        keys = read_text(path, "keys", "give a file of one per line").split()
        if not keys:
            raise ConfigError(f"{path} has no key; give a file of one key per line")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ConfigError(f"a key of {path or variable} has other characters than printable ASCII; change it")
    return tuple(keys)


def read_text(path: Path, what: str, remedy: str) -> str:
    """Return the content of a file of `what`. Raise ConfigError with a remedy if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read {what} from {path}: {reason}; {remedy}") from None


def key_header(key: str) -> tuple[bytes, bytes]:
    """Return the header that sends a key."""
    return _AUTHORIZATION, b"Bearer " + key.encode()


class KeyCheck:
    """ASGI middleware that refuses requests without a valid key, and gives engines a key of their own.

    With `keys`, clients must send one of them, and it is not relayed to engines. With `engine_key`, engines
    get this key instead of the client's. `on_refused` is called for each answer with 401.
    """

    def __init__(
        self, app: ASGIApp, keys: Iterable[str], engine_key: str | None, on_refused: Callable[[], None]
    ) -> None:
        self._on_refused = on_refused
        self._app = app
        # Digests have one length, so comparing them tells nothing of a key's.
        self._digests = tuple(sha256(key.encode()).digest() for key in keys)
        self._engine = None if engine_key is None else key_header(engine_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if not self._may_pass(scope):
                self._on_refused()
                await _UNAUTHORIZED.reply(scope["path"]).send(send)
                return
            kept = [pair for pair in scope["headers"] if pair[0] != _AUTHORIZATION]
            if self._engine is not None:
                scope = {**scope, "headers": [*kept, self._engine]}
            elif self._digests:
                scope = {**scope, "headers": kept}
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if not self._digests or scope["path"] in _OPEN_PATHS:
            return True
        values = [value for name, value in scope["headers"] if name == _AUTHORIZATION]
        if len(values) != 1 or not values[0].lower().startswith(_BEARER):
            return False
        given = sha256(values[0][len(_BEARER) :].strip()).digest()
        # Compare with every key, so that the time tells nothing about any of them.
        return sum(hmac.compare_digest(given, digest) for digest in self._digests) > 0
