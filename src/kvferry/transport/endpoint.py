"""Addresses as ZeroMQ wants them."""

from __future__ import annotations

from typing import Any

import zmq


def zmq_endpoint(socket: zmq.Socket[Any], host: str, port: int | str) -> str:
    """What to bind or connect `socket` to; mutates it where the host is an IPv6 address.

    Args:
        socket: not bound or connected yet.
        host: name, IPv4 or bare IPv6 address.
        port: number, or ``*`` for any free one.
    """
    if ":" not in host:
        return f"tcp://{host}:{port}"
    socket.ipv6 = True
    return f"tcp://[{host.strip('[]')}]:{port}"
