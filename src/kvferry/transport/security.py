"""CURVE keys of the control and gather channels, which are always encrypted and authenticated.

All engines that may exchange KV share one secret. Each derives the same CURVE key pair from it. A listener
admits only clients that prove that they have this pair. A peer with an engine's transport metadata can read
the engine's memory, so no channel works without keys.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from kvferry.errors import ConfigError

SECRET_BYTES = 32  # size in bytes of the secrets that kvferry creates


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair, Z85-encoded, with which engines encrypt and authenticate their connections."""

    public: bytes
    secret: bytes

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that identify the key pair in messages, without revealing the keys."""
        return hashlib.blake2b(self.public, digest_size=4, person=b"kvferry-finger").hexdigest()


def derive_keys(secret: bytes) -> Keys:
    """Derive a key pair from a secret. Raise ConfigError if libzmq was built without CURVE."""
    own = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"kvferry-curve").digest())
    try:
        return Keys(zmq.curve_public(own), own)
    except zmq.ZMQError as error:
        raise ConfigError(
            "this pyzmq's libzmq cannot encrypt (CURVE), which channels between engines need; "
            "install pyzmq from its wheel"
        ) from error


def admin_token(keys: Keys) -> str:
    """Return the token of the admin API of engines with these keys: 64 hex digits."""
    # A digest, so that the keys cannot be computed from it. Operators send it over HTTP.
    return hashlib.blake2b(keys.secret, digest_size=32, person=b"kvferry-admin").hexdigest()


def random_keys() -> Keys:
    """Return a new key pair."""
    return derive_keys(secrets.token_bytes(SECRET_BYTES))


def secure_server(socket: zmq.Socket[Any], keys: Keys) -> None:
    """Encrypt the connections of a socket that is not bound yet. An `Authenticator` checks the clients."""
    socket.curve_secretkey, socket.curve_publickey, socket.curve_server = keys.secret, keys.public, True


def secure_client(socket: zmq.Socket[Any], keys: Keys) -> None:
    """Encrypt the connection of a ZeroMQ socket that is not connected yet."""
    socket.curve_secretkey, socket.curve_publickey, socket.curve_serverkey = (
        keys.secret, keys.public, keys.public,
    )  # fmt: skip
