"""Addresses of peers: numeric ones, and what they say."""

from __future__ import annotations

import ipaddress
from typing import TypeAlias

IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_ip(host: str) -> IP | None:
    """Return the address that a host is, None for a name; an IPv4 address within IPv6 is that IPv4 address.

    >>> numeric("::ffff:10.0.0.7"), numeric("[::1]"), numeric("node7"), numeric("127.1")
    (IPv4Address('10.0.0.7'), IPv6Address('::1'), None, None)
    """
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Whether a host is reached from its own machine alone.

    >>> is_loopback("localhost"), is_loopback("127.8.8.8"), is_loopback("0.0.0.0"), is_loopback("node7")
    (True, True, False, False)
    """
    address = parse_ip(host)
    return host == "localhost" if address is None else address.is_loopback
