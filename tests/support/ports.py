"""Ports for servers that tests start."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

OWN_ADDRESS = f"127.{1 + os.getpid() // 250 % 250}.{1 + os.getpid() % 250}.1"
"""A loopback address of this process alone, so that no other process takes ports of it."""


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that no other process gets by chance, until the ``with`` block ends.

    A socket that does not listen holds the port. A server that sets SO_REUSEADDR can listen on it.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]
