"""CURVE keys of the control and gather channels, which are always encrypted and authenticated.

All engines that may exchange KV share one secret. Each derives the same CURVE key pair from it, and a
listener admits only clients that prove to hold that pair. Transport metadata lets its reader read an engine's
memory, so there is no channel without keys.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from kvferry.errors import ConfigError

SECRET_BYTES = 32
"""Bytes of a secret that kvferry creates."""


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair, encoded as Z85."""

    public: bytes
    secret: bytes

    @property
    def fingerprint(self) -> str:
        """Eight hex digits for comparing keys, from which the key cannot be derived."""
        return hashlib.blake2b(self.public, digest_size=4, person=b"kvferry-finger").hexdigest()


def derive_keys(secret: bytes) -> Keys:
    """Return the key pair of a secret.

    Raises:
        ConfigError: libzmq was built without CURVE.
    """
    own = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"kvferry-curve").digest())
    try:
        return Keys(zmq.curve_public(own), own)
    except zmq.ZMQError as error:
        raise ConfigError(
            "this pyzmq's libzmq cannot encrypt (CURVE), which channels between engines need; "
            "install pyzmq from its wheel"
        ) from error


def random_keys() -> Keys:
    """Return a random key pair."""
    return derive_keys(secrets.token_bytes(SECRET_BYTES))


def secure_server(socket: zmq.Socket[Any], keys: Keys) -> None:
    """Configure a socket to accept authenticated connections."""
    socket.curve_secretkey, socket.curve_publickey, socket.curve_server = keys.secret, keys.public, True


def secure_client(socket: zmq.Socket[Any], keys: Keys) -> None:
    """Configure a socket to connect with this key pair."""
    socket.curve_secretkey, socket.curve_publickey, socket.curve_serverkey = (
        keys.secret, keys.public, keys.public,
    )  # fmt: skip
