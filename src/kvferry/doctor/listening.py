"""Check the address that an engine would listen on, the machines that could reach it, and its key."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Mapping

from kvferry.connector.config import NODE, ConnectorConfig
from kvferry.doctor.finding import Finding, bad, from_error, note, ok
from kvferry.errors import ConfigError
from kvferry.transport.address import is_loopback, parse_ip
from kvferry.transport.key_file import existing_keys, key_location

_TEST_ROUTE = "192.0.2.1", 9  # TEST-NET-1, RFC 5737: nothing is sent to it


def node_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address on which an engine listens if its setting ``host`` is ``node``.

    This is the value of ``VLLM_HOST_IP`` if it is set, else the address of the network interface with the
    default route. If there is no default route, it is 127.0.0.1.

    Args:
        environment: environment variables.
    """
    if given := environment.get("VLLM_HOST_IP"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(_TEST_ROUTE)
            return str(sock.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def check(config: ConnectorConfig) -> list[Finding]:
    """Check the network settings of an engine: key, allowed peers, advertised address and port."""
    if not config.transfers:
        return [ok("listening", "no KV is exchanged, so nothing listens")]
    host = node_address() if config.host == NODE else config.host
    return [
        key(config.secret_file),
        access(config, host),
        *advertised(config.advertise_host),
        *address(host, config.port),
    ]


def key(secret_file: str | None) -> Finding:
    """Check the key file that an engine of this user would use to authenticate peers.

    Args:
        secret_file: path of the key file in the settings; None for this machine's default key.
    """
    subject = "key"
    try:
        place, keys = key_location(secret_file), existing_keys(secret_file)
    except ConfigError as error:
        return from_error(subject, error)
    if keys is None:
        return ok(subject, f"{place}: created by the first engine that needs it")
    mode = f"{stat.S_IMODE(place.path.stat().st_mode):o}"
    return ok(
        subject,
        f"{place} (mode {mode}), fingerprint {keys.fingerprint}: engines with the same fingerprint can "
        "exchange KV",
    )


def access(config: ConnectorConfig, host: str) -> Finding:
    """Report which other engines could exchange KV with an engine with these settings.

    Args:
        config: settings of the engine.
        host: address on which the engine would listen.
    """
    subject = "host"
    advertised_host = config.advertise_host or host
    if is_loopback(host):
        return ok(subject, f"{advertised_host}: only engines on this machine can exchange KV")
    if config.secret_file is not None:
        where = f" at {', '.join(config.peers)} (peers)" if config.peers else ""
        return ok(subject, f"{advertised_host}: all engines with the key{where} can exchange KV")
    return note(
        subject,
        f"{advertised_host}, and no secret_file: only this user's engines on this machine have the key",
        "for engines on other machines, run kvferry keygen FILE, copy the file to all machines, and set "
        "secret_file",
    )


def advertised(advertised_host: str | None) -> list[Finding]:
    """Return a note if the address that an engine advertises to its peers is a host name; empty otherwise.

    A peer resolves only ``localhost`` and the host names in its own setting ``peers``.

    Args:
        advertised_host: value of the setting ``advertise_host``; None if it is not set.
    """
    if advertised_host is None or advertised_host == "localhost" or parse_ip(advertised_host) is not None:
        return []
    return [
        note(
            "advertise_host",
            f"{advertised_host} is a host name, which other engines resolve only if their peers setting "
            "lists it",
            f"add --peers {advertised_host} to their configuration, or advertise an IP address",
        )
    ]


def address(host: str, port: int) -> list[Finding]:
    """Check whether a control channel could listen at an address now.

    Args:
        host: host name or IP address.
        port: port number; 0 for any free port.
    """
    subject = "port"
    try:
        family, kind, number, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return [
            bad(
                "host",
                f"{host} cannot be resolved: {error.strerror or error}",
                'give an address of this machine, or "node"',
            )
        ]
    with socket.socket(family, kind, number) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(place)
        except OSError as error:
            return [_cannot_listen(host, port, error)]
    return [ok(subject, f"{port} is free" if port else "any free port, a new one at every start")]


def _cannot_listen(host: str, port: int, error: OSError) -> Finding:
    if error.errno == errno.EADDRNOTAVAIL:
        return bad(
            "host",
            f"{host} is not an address of this machine",
            "run this where the engine runs, or correct host",
        )
    if error.errno == errno.EADDRINUSE:
        return bad(
            "port",
            f"{port} on {host} is in use",
            "stop the program that listens there, unless it is this engine, or choose another port "
            "(0 for any free one)",
        )
    return bad(
        "port", f"cannot listen on {host} port {port}: {error.strerror}", "choose another host or port"
    )
