"""Where an engine of a configuration would listen, who could reach it, and its secret."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

import zmq

from kvferry.doctor.finding import Finding, bad, note, ok, refused
from kvferry.engines.vllm.config import NODE, ConnectorConfig
from kvferry.errors import ConfigError
from kvferry.transport import security

_TEST_ROUTE = "192.0.2.1", 9  # TEST-NET-1, RFC 5737: nothing is sent to it


def node_address(environment: Mapping[str, str] = os.environ) -> str:
    """The address that ``host: node`` stands for: ``VLLM_HOST_IP``, or the default route's."""
    if given := environment.get("VLLM_HOST_IP"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(_TEST_ROUTE)
            return str(sock.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def check(config: ConnectorConfig) -> list[Finding]:
    """All of it; nothing where no KV is exchanged."""
    if not config.transfers:
        return [ok("listening", "no KV is exchanged, so nothing listens")]
    host = node_address() if config.host == NODE else config.host
    return [*secret(config.secret_file), who_may(config, host), *address(host, config.port)]


def secret(path: str | None) -> list[Finding]:
    """Whether the secret can be used, and is one."""
    subject = "secret_file"
    if path is None:
        return []
    try:
        security.read_keys(path)
        about = Path(path).stat()
    except ConfigError as error:
        return [refused(subject, error, "create it: head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE")]
    except zmq.ZMQError:
        return [_no_curve()]
    found = [] if zmq.has("curve") else [_no_curve()]
    if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = f"{about.st_mode & 0o777:o}"
        found.append(
            bad(subject, f"{path} can be used by others than its owner (mode {mode})", f"chmod 600 {path}")
        )
    if about.st_uid not in (os.geteuid(), 0):
        found.append(
            bad(
                subject,
                f"{path} belongs to user {about.st_uid}, not to the one that runs this",
                f"chown it to {os.geteuid()}",
            )
        )
    return found or [ok(subject, f"{path}: only its owner can read it; the channel is encrypted (CURVE)")]


def _no_curve() -> Finding:
    return bad(
        "CURVE",
        "this pyzmq's libzmq cannot encrypt, so an engine with a secret_file does not start",
        "install pyzmq from its wheel, whose libzmq can",
    )


def who_may(config: ConnectorConfig, host: str) -> Finding:
    """Who could read the engine's memory."""
    subject = "host"
    told = config.advertise_host or host
    try:
        security.check_host(
            host, None, allow_insecure=config.secret_file is not None or config.allow_insecure
        )
    except ConfigError as error:
        return refused(subject, error)
    if security.is_loopback(told):
        return ok(subject, f"{told}: engines of this machine alone can exchange KV")
    if config.secret_file is not None:
        return ok(subject, f"{told}: whoever has the secret can exchange KV")
    return note(
        subject,
        f"{told}, without a secret (allow_insecure): whoever reaches it can read this engine's memory",
        "set secret_file on all engines, unless the network is trusted",
    )


def address(host: str, port: int) -> list[Finding]:
    """Whether the control channel could listen there now."""
    subject = "port"
    try:
        family, kind, number, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return [
            bad(
                "host",
                f"{host} is no address: {error.strerror or error}",
                "give an address of this machine, or node",
            )
        ]
    with socket.socket(family, kind, number) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(place)
        except OSError as error:
            return [_cannot_listen(host, port, error)]
    return [ok(subject, f"{port} is free" if port else "any free one, another at every start")]


def _cannot_listen(host: str, port: int, error: OSError) -> Finding:
    if error.errno == errno.EADDRNOTAVAIL:
        return bad(
            "host", f"{host} is no address of this machine", "run this where the engine runs, or correct host"
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
