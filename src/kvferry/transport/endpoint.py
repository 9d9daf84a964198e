"""Addresses in the form that ZeroMQ takes."""

from __future__ import annotations

from typing import Any

import zmq


def zmq_endpoint(socket: zmq.Socket[Any], host: str, port: int | str) -> str:
    """Return the endpoint to bind or connect to; enable IPv6 on `socket` if the host is an IPv6 address.

    Args:
        socket: a socket that is not bound or connected yet.
        host: name, IPv4 or bare IPv6 address.
        port: number, or ``*`` for any free one.
    """
    if ":" not in host:
        return f"tcp://{host}:{port}"
    socket.ipv6 = True
    return f"tcp://[{host.strip('[]')}]:{port}"
