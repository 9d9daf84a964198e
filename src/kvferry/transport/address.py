"""Parse IP addresses and host names."""

from __future__ import annotations

import ipaddress
import re
from typing import Any, TypeAlias

import zmq

from kvferry.errors import ConfigError

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
# The last label is no number, so that an incomplete IP address such as "10.0.0" is no name.
_NAME = re.compile(rf"(?=.{{1,253}}\.?\Z)({_LABEL}\.)*(?!\d+\.?\Z){_LABEL}\.?\Z")

IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_ip(host: str) -> IP | None:
    """Parse an IP address; None if `host` is not a complete one, for example a host name.

    IPv6 addresses may be in brackets. An IPv4-mapped IPv6 address is converted to IPv4.

    >>> parse_ip("::ffff:10.0.0.7"), parse_ip("[::1]"), parse_ip("node7"), parse_ip("127.1")
    (IPv4Address('10.0.0.7'), IPv6Address('::1'), None, None)
    """
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    # A dual-stack listener sees IPv4 clients so, and rules for IPv4 networks must apply to them.
    return getattr(address, "ipv4_mapped", None) or address


def parse_host(host: str) -> IP | None:
    """Parse an IP address like `parse_ip`. ``localhost`` is 127.0.0.1, because it needs no name server."""
    return parse_ip("127.0.0.1" if host == "localhost" else host)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`.

    >>> is_loopback("localhost"), is_loopback("127.8.8.8"), is_loopback("0.0.0.0"), is_loopback("node7")
    (True, True, False, False)
    """
    address = parse_ip(host)
    return host == "localhost" if address is None else address.is_loopback


def is_host_name(text: str) -> bool:
    """Return whether a text has the form of a host name, and not of an IP address.

    >>> [is_host_name(text) for text in ("node7", "kv.svc.", "10.0.0.7", "node7:5600", "http://node7", "")]
    [True, True, False, False, False, False]
    """
    return _NAME.match(text) is not None


def is_every_address(host: str) -> bool:
    """Return whether a host to listen on stands for every address of the machine.

    >>> [is_every_address(host) for host in ("*", "0.0.0.0", "[::]", "127.0.0.1")]
    [True, True, True, False]
    """
    address = parse_ip(host)
    return host == "*" if address is None else address.is_unspecified


def zmq_endpoint(socket: zmq.Socket[Any], host: str, port: int | str) -> str:
    """Return an address as ZeroMQ takes it, such as ``tcp://10.0.0.1:5555``. The port ``*`` is any free one.

    If `host` is an IPv6 address, with or without brackets, IPv6 is enabled on the socket.
    """
    if ":" not in host:
        return f"tcp://{host}:{port}"
    socket.ipv6 = True  # off by default, and then ZeroMQ refuses such an address
    return f"tcp://[{host.strip('[]')}]:{port}"


def check_host(name: str, host: str) -> None:
    """Raise ConfigError if a setting is neither a host name nor an IP address that one machine can have."""
    address = parse_ip(host)
    if not is_host_name(host) if address is None else address.is_multicast:
        raise ConfigError(
            f"{name} is {host!r}; it must be a host name or IP address, such as 10.0.0.7, without scheme, "
            "port or network length"
        )
