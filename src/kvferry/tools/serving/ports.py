"""TCP ports of this machine."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress

import psutil

from kvferry.errors import KVFerryError

# As uvicorn's: clients that connect at once must not be refused.
_BACKLOG = 2048


class ListenError(KVFerryError):
    """Raised if this process cannot listen on an address."""


def free_ports(count: int) -> list[int]:
    """Return `count` distinct free ports. Another process may take them before the caller uses them."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def listen(host: str, port: int) -> socket.socket:
    """Open and return a listening socket. Port 0 is any free port.

    Raises:
        ListenError: the process cannot listen on the address, for example because the port is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE and (holder := port_holder(port)):
            reason += f" by {holder}"
        raise ListenError(
            f"cannot listen on {host}:{port}: {reason}; choose another --host or --port"
        ) from error
    return sock


def port_holder(port: int) -> str:
    """Return the process that listens on a port, such as ``nginx (process 71)``; empty if it is not known."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return ""


def url_of(sock: socket.socket) -> str:
    """Return the HTTP URL with the address and port of a listening socket, without a trailing slash."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"
