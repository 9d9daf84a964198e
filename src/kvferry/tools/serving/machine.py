"""Check without vLLM that this machine has the address, files and memory that an engine needs."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from kvferry.common.errors import ConfigError
from kvferry.common.units import format_bytes, parse_size
from kvferry.connector import NODE, ConnectorConfig, read_tiers
from kvferry.observe import check_line_file
from kvferry.tiers import check_available
from kvferry.transport import LEAST_BYTES, SHARED_MEMORY, existing_keys, load_costs

_TEST_ROUTE = "192.0.2.1", 9  # TEST-NET-1, RFC 5737: nothing is sent to it
# Shared memory for each worker of an engine that has several.
_WORKER_BYTES = 64 << 20


class PortInUse(ConfigError):
    """Raised if a program listens on the port of an engine."""


def check_machine(config: ConnectorConfig) -> None:
    """Check that an engine with these settings can use the files, directories and memory that they name.

    Nothing is left behind: the key of this machine and the default directory of the file tier are not made.
    Object storage is not contacted.

    Raises:
        ConfigError: a file, directory or address is missing or cannot be used, or the machine has too little
            memory.
    """
    load_costs(config.costs)
    if config.transfers:
        with suppress(PortInUse):  # perhaps by the engine that this configuration is for
            check_listening(config.host, config.port)
        existing_keys(config.secret_file)
        if config.transfer_log is not None:
            check_line_file("transfer_log", config.transfer_log)
    if config.record is not None:
        check_line_file("record", config.record)
    tiers = read_tiers(config.tiers)
    if tiers is None:
        return
    if tiers.host.capacity is not None:
        check_available(parse_size(tiers.host.capacity))
    for slow in tiers.slow:
        slow.check_storage()


def node_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address on which an engine listens if its setting ``host`` is ``node``.

    This is ``VLLM_HOST_IP`` if it is set, else the address of the network interface with the default route,
    else 127.0.0.1.
    """
    if given := environment.get("VLLM_HOST_IP"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(_TEST_ROUTE)
            return str(sock.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def check_listening(host: str, port: int) -> None:
    """Check that an engine on this machine can listen on a host and port; 0 is any free port.

    Raises:
        PortInUse: another program listens there.
        ConfigError: the host is not an address of this machine, or this user may not use the port.
    """
    host = node_address() if host == NODE else "0.0.0.0" if host == "*" else host  # noqa: S104 - zmq's name
    try:
        # Without the brackets that an IPv6 address may have.
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"host {host} cannot be resolved: {error.strerror or error}; give an address of this machine, or "
            '"node"'
        ) from error
    family, kind, number, _, place = found[0]
    with socket.socket(family, kind, number) as sock:
        # As ZeroMQ does: a port that was just closed is free.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(place)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"host {host} is not an address of this machine; run this where the engine runs, or correct host"
        )
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"port {port} on {host} is in use; stop the program that listens there, unless it is this "
            "engine, or choose another port (0 for any free one)"
        )
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another host or port")


def check_shared_memory(
    workers: Sequence[int],
    stat: Callable[[str], os.statvfs_result] = lambda path: os.statvfs(path),  # noqa: PLW0108 - not on Windows
) -> None:
    """Check that ``/dev/shm`` has room for engines with these numbers of workers.

    Raises:
        ConfigError: the file system is missing, cannot be written to, or is too small.
    """
    try:
        found = stat(SHARED_MEMORY)
    except OSError as error:
        raise ConfigError(
            f"{SHARED_MEMORY} cannot be used: {os.strerror(error.errno or 0)}; mount a tmpfs there, because "
            "the processes of an engine communicate through it"
        ) from error
    if found.f_flag & os.ST_RDONLY:
        raise ConfigError(f"{SHARED_MEMORY} is mounted read-only; mount a tmpfs there for writing")
    needed = sum(LEAST_BYTES + (count * _WORKER_BYTES if count > 1 else 0) for count in workers)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    if needed > free:
        gibibytes = -(-(needed + total - free) // (1 << 30))
        raise ConfigError(
            f"{SHARED_MEMORY} has {format_bytes(free)} free of {format_bytes(total)}, {len(workers)} engines "
            f"with {sum(workers)} workers need {format_bytes(needed)}; remove unused files there, or enlarge "
            f"it (docker: --shm-size={gibibytes}g, Kubernetes: an emptyDir with "
            f"medium Memory at {SHARED_MEMORY})"
        )
