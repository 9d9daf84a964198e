"""Restrict the network devices on which NIXL listens, and the time that it waits for connections.

UCX, NIXL's transport, opens a TCP port on every network device that it uses. It does not authenticate
clients, and random bytes crash the process. So UCX is restricted to the device with the address that the
operator chose for peers. If that is a loopback address, UCX cannot be reached from outside the machine. With
any other address, UCX also uses all RDMA devices, because they have no such port. Shared memory is not a
network device, so it is always used.

By default, a thread that connects to a peer over TCP waits inside UCX until the peer's machine answers, for
minutes if it never does. Meanwhile that thread serves no other peer. So UCX is told to connect in the
background, and to give up sooner.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from kvferry.transport.address import IP, is_every_address, is_loopback
from kvferry.transport.port_range import PortRange

logger = logging.getLogger(__name__)

VARIABLE = "UCX_NET_DEVICES"
PORTS_VARIABLE = "UCX_TCP_PORT_RANGE"
# UCX's settings of TCP connections: connect in the background, and repeat an unanswered request 3 times. With
# 3, Linux 6.18 gave up after 20 s; with its default, not within two minutes. So the blocks of a load that
# waits for a connection are free again before its deadline (`load_timeout_seconds`, 30 s by default).
CONNECTIONS = {"UCX_TCP_CONN_NB": "y", "UCX_TCP_SYN_CNT": "3"}
_INFINIBAND = Path("/sys/class/infiniband")
_lock = threading.Lock()


def devices_for(host: str, infiniband: Path = _INFINIBAND) -> tuple[str, ...]:
    """Return the network devices to which UCX is restricted; empty for no restriction.

    For a loopback address, these are the loopback devices; for any other, the devices that have it, and all
    RDMA devices. There is no restriction if `host` stands for every address, or no device has it.
    """
    if is_every_address(host):
        return ()
    if is_loopback(host):
        devices = psutil.net_if_stats().items()
        return tuple(name for name, has in devices if "loopback" in has.flags.split(","))
    if not (found := _with_address(host)):
        return ()
    # As UCX spells RDMA devices: device:port.
    ports = sorted(f"{port.parent.parent.name}:{port.name}" for port in infiniband.glob("*/ports/*"))
    return (*found, *ports)


def is_local_address(host: str) -> bool:
    """Return whether an address, or a name that resolves to one, belongs to this machine."""
    return is_loopback(host) or bool(_with_address(host))


@contextmanager
def restrict_ucx_to(host: str, ports: PortRange | None = None) -> Iterator[None]:
    """Restrict NIXL agents that are created inside the ``with`` statement to devices of a host, and to ports.

    A value that the operator has set in the environment is kept.
    """
    with _lock:
        if (given := os.environ.get(VARIABLE)) is not None:
            logger.info("UCX listens on the devices of %s=%s, whatever host says (%s)", VARIABLE, given, host)
        if ports is not None and (given := os.environ.get(PORTS_VARIABLE)) is not None:
            logger.info(
                "UCX listens on ports of %s=%s, whatever ports says (%s)", PORTS_VARIABLE, given, ports
            )
        chosen = ucx_environment(host, ports)
        # UCX reads its settings when an agent is created, and only from the environment.
        os.environ.update(chosen)
        try:
            yield
        finally:
            for name in chosen:
                os.environ.pop(name, None)


def ucx_environment(host: str, ports: PortRange | None = None) -> dict[str, str]:
    """Return the environment variables that restrict UCX to devices and ports, and its waits (`CONNECTIONS`).

    A variable without a restriction, or that the operator has set, is left out.
    """
    devices = devices_for(host)
    wanted = {
        VARIABLE: ",".join(devices),
        PORTS_VARIABLE: "" if ports is None else str(ports),
        **CONNECTIONS,
    }
    return {name: value for name, value in wanted.items() if value and name not in os.environ}


def addresses() -> Iterator[tuple[str, IP]]:
    """Yield (name of the device, address) for every IP address of this machine."""
    for name, has in psutil.net_if_addrs().items():
        for one in has:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                # A further address may have a label ("eth0:1"); a link-local address names its device
                # ("%eth0").
                yield name.partition(":")[0], ipaddress.ip_address(one.address.partition("%")[0])


def _with_address(host: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    wanted = {ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in found}
    return tuple(sorted({name for name, address in addresses() if address in wanted}))
