"""The setting ``peers``: machines that this engine may connect to, and that may connect to it.

A peer must have the key as well. A request or a peer can name any address, and the engine connects to it.
These rules limit the addresses.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.errors import ConfigError
from kvferry.transport.address import IP, is_host_name, is_loopback, parse_host, parse_ip

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_ENTRIES = 1024
_LOOPBACK = ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128")
_KINDS = "a host name, an address, or a network such as 10.0.0.0/8; a host may have its engine's port"
# An entry with a port: a host name, an IPv4 address, or an IPv6 address in brackets.
_ENGINE = re.compile(r"(\[[^\[\]/]+\]|[^:\[\]/]+):([1-9][0-9]{0,4})")


@dataclass(frozen=True, slots=True)
class AllowedPeers:
    """The machines that may be peers of this engine, from the setting ``peers``.

    Attributes:
        networks: None to allow all addresses.
        names: host names that the engine may resolve, in lower case. Their addresses are allowed too.
        engines: control channels to which the engine connects when it starts.
    """

    networks: tuple[Network, ...] | None = None
    names: tuple[str, ...] = ()
    engines: tuple[tuple[str, int], ...] = ()

    def allows(self, address: IP) -> bool:
        """Return whether the allowed networks contain an address. Names are not considered.

        Multicast addresses and the unspecified address (0.0.0.0 or ::) are never allowed.

        >>> AllowedPeers(_LOOPBACK).allows(ipaddress.ip_address("127.0.0.9"))
        True
        """
        if address.is_unspecified or address.is_multicast:
            return False
        return self.networks is None or any(address in network for network in self.networks)

    def lists(self, name: str) -> bool:
        return normalize_name(name) in self.names

    def may_allow(self, host: str) -> bool:
        """Return False if a host is not allowed, and True if it could be, without resolving names."""
        address = parse_host(host)
        if address is None:
            return self.lists(host)
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
        entries: host names, IP addresses and IP networks. Hosts may have the port of an engine's control
            channel. None if the setting is not set: then an engine that listens on loopback accepts loopback
            addresses only, and any other engine accepts all.
        host: address that the engine listens on.
        advertised: host under which peers reach this engine; None if not set.

    Raises:
        ConfigError: an entry is malformed, the list is empty, or it has more than `MAX_ENTRIES` entries.
    """
    if entries is None:
        if is_loopback(host):
            return AllowedPeers(_LOOPBACK)
        # Other engines on this machine may be reached under the same name.
        own = (normalize_name(advertised),) if advertised and is_host_name(advertised) else ()
        return AllowedPeers(None, own)
    if not 0 < len(entries) <= MAX_ENTRIES:
        raise ConfigError(
            f"peers has {len(entries)} entries, expected 1 to {MAX_ENTRIES}; name the engines' machines or "
            "networks, or leave peers out to allow all that have the key"
        )
    networks, names, engines = list[Network](), list[str](), list[tuple[str, int]]()
    for number, text in enumerate(entries):
        entry = text
        if (found := _ENGINE.fullmatch(text)) is not None and int(found[2]) < 1 << 16:
            entry = found[1]
            engines.append((str(parse_host(entry) or entry), int(found[2])))
        if entry == "localhost":
            networks += _LOOPBACK
        elif (network := _network(entry, number)) is not None:
            networks.append(network)
        else:
            names.append(_name(entry, number))
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


def _name(entry: str, number: int) -> str:
    if is_host_name(entry):
        return normalize_name(entry)
    pattern = "; a name stands for all its addresses, like that of a headless service" if "*" in entry else ""
    raise ConfigError(f"peers[{number}] is {entry!r}; give {_KINDS}{pattern}")
