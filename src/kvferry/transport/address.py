"""Parse IP addresses of peers."""

from __future__ import annotations

import ipaddress
from typing import TypeAlias

IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_ip(host: str) -> IP | None:
    """Parse an IP address. Return None if `host` is not a complete IP address, for example a host name.

    IPv6 addresses may be in brackets. An IPv4-mapped IPv6 address is converted to IPv4.

    >>> parse_ip("::ffff:10.0.0.7"), parse_ip("[::1]"), parse_ip("node7"), parse_ip("127.1")
    (IPv4Address('10.0.0.7'), IPv6Address('::1'), None, None)
    """
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Return whether `host` is ``localhost`` or a loopback address, which only this machine can reach.

    >>> is_loopback("localhost"), is_loopback("127.8.8.8"), is_loopback("0.0.0.0"), is_loopback("node7")
    (True, True, False, False)
    """
    address = parse_ip(host)
    return host == "localhost" if address is None else address.is_loopback
