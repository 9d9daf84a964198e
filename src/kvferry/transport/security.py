"""Who may speak on the control channel.

With a secret, both sides derive the same CURVE key pair from it: traffic is encrypted, and a server lets in
only those whose public key is that one. Without a secret the channel is plain, and then only loopback may be
listened on, unless the operator says otherwise: transport metadata lets whoever has it read this memory.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from kvferry.errors import ConfigError

MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair, z85."""

    public: bytes
    secret: bytes


def read_keys(secret_file: str | None) -> Keys | None:
    """The key pair that a shared secret stands for; None without one.

    Raises:
        ConfigError: the file cannot be read, or holds too little to be a secret.
    """
    if secret_file is None:
        return None
    try:
        text = Path(secret_file).read_bytes().strip()
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ConfigError(
            f"secret_file {secret_file}: {why}; name the file with the engines' secret"
        ) from error
    if len(text) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"secret_file {secret_file} holds {len(text)} bytes, a secret has at least {MIN_SECRET_BYTES}"
        )
    secret = z85.encode(hashlib.blake2b(text, digest_size=32, person=b"kvferry-curve").digest())
    return Keys(zmq.curve_public(secret), secret)


def check_host(host: str, keys: Keys | None, allow_insecure: bool) -> None:
    """Raise ConfigError for a host that would expose an unauthenticated channel."""
    if keys is None and not allow_insecure and not is_loopback(host):
        raise ConfigError(
            f"host {host} is not loopback and no secret_file is set: anyone who reaches it could read "
            "this engine's memory; set secret_file on both engines, or allow_insecure on a trusted network"
        )


def is_loopback(host: str) -> bool:
    """Whether an address, or the one name for it, is this machine's alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _OnlyOurs:
    """Lets in whoever has derived the same key pair."""

    def __init__(self, keys: Keys) -> None:
        self._public = keys.public

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - pyzmq calls it so
        return key == self._public


def guard(context: zmq.Context[Any], keys: Keys) -> ThreadAuthenticator:
    """Start the gatekeeper of a server's context; stop it with the server."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=_OnlyOurs(keys))
    return authenticator


def as_server(socket: zmq.Socket[Any], keys: Keys | None) -> None:
    """Set a socket up as the side that is connected to."""
    if keys is not None:
        socket.curve_secretkey, socket.curve_publickey, socket.curve_server = keys.secret, keys.public, True


def as_client(socket: zmq.Socket[Any], keys: Keys | None) -> None:
    """Set a socket up as the side that connects."""
    if keys is not None:
        socket.curve_secretkey, socket.curve_publickey, socket.curve_serverkey = (
            keys.secret, keys.public, keys.public,
        )  # fmt: skip
