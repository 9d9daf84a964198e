"""Addresses and ports, and the setting ``peers``: machines to which this engine may connect, and the reverse.

A peer must have the key as well. A request or a peer can name any address, and the engine connects to it.
These rules limit the addresses.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq

from kvferry.common.errors import ConfigError

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
# The last label is no number, so that an incomplete IP address such as "10.0.0" is no name.
_NAME = re.compile(rf"(?=.{{1,253}}\.?\Z)({_LABEL}\.)*(?!\d+\.?\Z){_LABEL}\.?\Z")

MAX_ENTRIES = 1024
_LOOPBACK = ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128")
_KINDS = "a host name, an address, or a network such as 10.0.0.0/8; a host may have its engine's port"
# An entry with a port: a host name, an IPv4 address, or an IPv6 address in brackets.
_ENGINE = re.compile(r"(\[[^\[\]/]+\]|[^:\[\]/]+):([1-9][0-9]{0,4})")
_RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")

IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


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


def _is_host_name(text: str) -> bool:
    """Return whether a text has the form of a host name, and not of an IP address.

    >>> [_is_host_name(text) for text in ("node7", "kv.svc.", "10.0.0.7", "node7:5600", "http://node7", "")]
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

    Mutates the socket: it is enabled for IPv6 if `host` is an IPv6 address, with or without brackets.
    """
    if ":" not in host:
        return f"tcp://{host}:{port}"
    socket.ipv6 = True  # off by default, and then ZeroMQ refuses such an address
    return f"tcp://[{host.strip('[]')}]:{port}"


def check_host(name: str, host: str) -> None:
    """Raise ConfigError if a setting is neither a host name nor an IP address that one machine can have."""
    address = parse_ip(host)
    if not _is_host_name(host) if address is None else address.is_multicast:
        raise ConfigError(
            f"{name} is {host!r}; it must be a host name or IP address, such as 10.0.0.7, without scheme, "
            "port or network length"
        )


@dataclass(frozen=True, slots=True)
class AllowedPeers:
    """The machines that may be peers of this engine, from the setting ``peers``."""

    networks: tuple[Network, ...] | None = None  # None to allow all addresses
    names: tuple[str, ...] = ()  # lower case; may be resolved, and their addresses are allowed too
    engines: tuple[tuple[str, int], ...] = ()  # connected at start

    def allows(self, address: IP) -> bool:
        """Return whether the allowed networks contain an address, which must be that of one machine.

        >>> AllowedPeers(_LOOPBACK).allows(ipaddress.ip_address("127.0.0.9"))
        True
        """
        if address.is_unspecified or address.is_multicast:
            return False
        return self.networks is None or any(address in network for network in self.networks)

    def may_allow(self, host: str) -> bool:
        """Return False if a host is not allowed, and True if it could be, without resolving names."""
        address = parse_host(host)
        if address is None:
            return normalize_name(host) in self.names
        # A listed name may resolve to any address.
        return self.allows(address) or (bool(self.names) and not address.is_unspecified)

    @property
    def loopback_only(self) -> bool:
        return self.networks == _LOOPBACK and not self.names


ANY_PEER = AllowedPeers()  # Rules that allow all addresses. No host name may be resolved.


def normalize_name(name: str) -> str:
    """Return the form of a host name that can be compared."""
    return name.lower().removesuffix(".")  # DNS ignores case, and a trailing dot marks a complete name


def parse_allowed_peers(entries: Sequence[str] | None, host: str, advertised: str | None) -> AllowedPeers:
    """Parse the setting ``peers``.

    Args:
        entries: host names, with or without the port of a control channel, IP addresses and IP networks. None
            allows loopback addresses only if the engine listens on loopback, else all addresses.
        host: address that the engine listens on.
        advertised: host under which peers reach this engine; None if not set.
    """
    if entries is None:
        if is_loopback(host):
            return AllowedPeers(_LOOPBACK)
        # Other engines on this machine may be reached under the same name.
        own = (normalize_name(advertised),) if advertised and _is_host_name(advertised) else ()
        return AllowedPeers(None, own)
    if not 0 < len(entries) <= MAX_ENTRIES:
        raise ConfigError(
            f"peers has {len(entries)} entries, expected 1 to {MAX_ENTRIES}; name the engines' machines or "
            "networks, or leave peers out to allow all that have the key"
        )
    networks, names, engines = list[Network](), list[str](), list[tuple[str, int]]()
    for number, text in enumerate(entries):
        entry = text
        if (engine := parse_engine(text)) is not None:
            entry = text.rpartition(":")[0]
            engines.append(engine)
        if entry == "localhost":
            networks += _LOOPBACK
        elif (network := _network(entry, number)) is not None:
            networks.append(network)
        elif _is_host_name(entry):
            names.append(normalize_name(entry))
        else:
            pattern = "; a name stands for all its addresses, like that of a headless service"
            raise ConfigError(f"peers[{number}] is {entry!r}; give {_KINDS}{pattern if '*' in entry else ''}")
    return AllowedPeers(tuple(networks), tuple(names), tuple(engines))


def _network(entry: str, number: int) -> Network | None:
    """Parse an entry as an IP address or network; None for a host name."""
    if (address := parse_ip(entry)) is not None:
        return ipaddress.ip_network(address)
    if "/" not in entry:
        return None
    try:
        network = ipaddress.ip_network(entry, strict=False)
    except ValueError:
        raise ConfigError(f"peers[{number}] is {entry!r}, which is no network; give {_KINDS}") from None
    if str(network) != str(ipaddress.ip_interface(entry)):
        raise ConfigError(
            f"peers[{number}] is {entry!r}, an address within a network; give {network} for all of the "
            f"network, or {entry.partition('/')[0]} for the address"
        )
    return network


def parse_engine(text: str) -> tuple[str, int] | None:
    """Parse the address of an engine's channel, a host with a port; None if `text` is something else.

    >>> parse_engine("10.0.0.1:5600"), parse_engine("[::1]:5600"), parse_engine("node7")
    (('10.0.0.1', 5600), ('::1', 5600), None)
    """
    found = _ENGINE.fullmatch(text)
    if found is None or int(found[2]) >= 1 << 16:
        return None
    address = parse_host(found[1])
    if address is None and not _is_host_name(found[1]):
        return None
    return str(address or found[1]), int(found[2])


def engine_text(address: tuple[str, int]) -> str:
    """Return an address in the form that `parse_engine` parses.

    >>> engine_text(("10.0.0.1", 5600)), engine_text(("::1", 5600))
    ('10.0.0.1:5600', '[::1]:5600')
    """
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class PortRange:
    """TCP ports from `first` to `last`, both included. The text is also UCX's form.

    >>> [*PortRange(5600, 5602)], str(PortRange(5600, 5602))
    ([5600, 5601, 5602], '5600-5602')
    """

    first: int
    last: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


def parse_port_range(text: str | None) -> PortRange | None:
    """Parse a range of ports, such as ``20000-20999``; None stands for all ports."""
    if text is None:
        return None
    found = _RANGE.fullmatch(text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]) <= 65_535:
        raise ConfigError(
            f"ports is {text!r}; write the first and the last port, 1 to 65535, such as 20000-20999"
        )
    return PortRange(int(found[1]), int(found[2]))
