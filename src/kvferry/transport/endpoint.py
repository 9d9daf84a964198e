"""Format addresses as ZeroMQ endpoints."""

from __future__ import annotations

from typing import Any

import zmq


def zmq_endpoint(socket: zmq.Socket[Any], host: str, port: int | str) -> str:
    """Return the ZeroMQ endpoint of an address, such as ``tcp://10.0.0.1:5555``.

    If `host` is an IPv6 address, also enable IPv6 on the socket.

    Args:
        socket: ZeroMQ socket that is not bound or connected yet.
        host: name, IPv4 address, or IPv6 address with or without brackets.
        port: port number; ``*`` to bind any free port.
    """
    if ":" not in host:
        return f"tcp://{host}:{port}"
    socket.ipv6 = True
    return f"tcp://[{host.strip('[]')}]:{port}"
