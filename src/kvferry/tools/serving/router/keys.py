"""API keys: those that clients must send, and the one that the router sends to engines."""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.errors import ConfigError
from kvferry.tools.serving.router.replies import ApiError

_UNAUTHORIZED = ApiError(
    401, "the API key is missing or wrong", "invalid_api_key", ((b"www-authenticate", b"Bearer"),)
)
# Load balancers, Kubernetes and Prometheus ask these without a key.
OPEN_PATHS = frozenset(("/health", "/load", "/metrics", "/ping"))
_AUTHORIZATION = b"authorization"
_BEARER = b"bearer "


def read_keys(path: Path | None, variable: str) -> tuple[str, ...]:
    """Return the keys in a file, one per line, or else the key in an environment variable; none if unset.

    Raises:
        ConfigError: the file cannot be read, or has no key, or a key is not plain ASCII.
    """
    if path is None:
        keys = [key] if (key := os.environ.get(variable, "").strip()) else []
    else:
        try:
            keys = path.read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(
                f"cannot read keys from {path}: {reason}; give a file of one per line"
            ) from None
        if not keys:
            raise ConfigError(f"{path} has no key; give a file of one key per line")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ConfigError(f"a key of {path or variable} has other characters than printable ASCII; change it")
    return tuple(keys)


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
        if not self._digests or scope["path"] in OPEN_PATHS:
            return True
        values = [value for name, value in scope["headers"] if name == _AUTHORIZATION]
        if len(values) != 1 or not values[0].lower().startswith(_BEARER):
            return False
        given = sha256(values[0][len(_BEARER) :].strip()).digest()
        # Compare with every key, so that the time tells nothing about any of them.
        return sum(hmac.compare_digest(given, digest) for digest in self._digests) > 0
