"""Network devices that NIXL may listen on.

UCX opens a TCP port on every network device that it uses. It does not ask who connects, and random bytes end
the process. So it is kept to the device of the address that the operator chose for peers. Where that is
loopback, nobody outside the machine can reach it. RDMA devices have no such port and stay in use beyond
loopback; shared memory is no network device.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvferry.transport.address import is_loopback

logger = logging.getLogger(__name__)

VARIABLE = "UCX_NET_DEVICES"
_EVERY_ADDRESS = ("0.0.0.0", "::", "*")  # noqa: S104 - names what restricts nothing
_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_MOST_ADDRESSES = 4096
_IFF_LOOPBACK = 0x8
_lock = threading.Lock()


def devices_for(host: str) -> tuple[str, ...]:
    """Return the network devices through which peers reach this engine at `host`; empty for all devices.

    Args:
        host: an address of this machine, or a name of one.
    """
    if host in _EVERY_ADDRESS:
        return ()
    if is_loopback(host):
        return _loopbacks()
    return (*found, *_rdma()) if (found := _with_address(host)) else ()


def is_local_address(host: str) -> bool:
    """Return whether an address or a name is this machine's."""
    return is_loopback(host) or bool(_with_address(host))


@contextmanager
def restrict_ucx_to(host: str) -> Iterator[None]:
    """Restrict NIXL agents that are made in this block to the devices of `host`.

    UCX reads its settings from the environment when an agent is made. So the variable is set until the block
    ends. A value that the operator has set wins.
    """
    with _lock:
        if (given := os.environ.get(VARIABLE)) is not None:
            logger.info("UCX listens on the devices of %s=%s, whatever host says (%s)", VARIABLE, given, host)
        chosen = ucx_environment(host)
        os.environ.update(chosen)
        try:
            yield
        finally:
            for name in chosen:
                os.environ.pop(name, None)


def ucx_environment(host: str) -> dict[str, str]:
    """Return what to set in the environment of a process so that UCX keeps to the devices of `host`."""
    devices = devices_for(host)
    return {VARIABLE: ",".join(devices)} if devices and VARIABLE not in os.environ else {}


def _loopbacks() -> tuple[str, ...]:
    def flags(name: str) -> int:
        try:
            return int(Path(f"/sys/class/net/{name}/flags").read_text(), 16)
        except (OSError, ValueError):
            return _IFF_LOOPBACK if name == "lo" else 0

    return tuple(name for _, name in socket.if_nameindex() if flags(name) & _IFF_LOOPBACK)


def _with_address(host: str) -> tuple[str, ...]:
    """Return the devices that have one of the addresses that `host` stands for."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    wanted = {ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in found}
    return tuple(sorted({name for name, address in (*_ipv4(), *_ipv6()) if address in wanted}))


def _ipv4() -> Iterator[tuple[str, ipaddress.IPv4Address]]:
    """Yield (device, address); ``struct ifconf`` of netdevice(7)."""
    space = bytearray(_MOST_ADDRESSES * _IFREQ_BYTES)
    view = (ctypes.c_char * len(space)).from_buffer(space)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iL", len(space), ctypes.addressof(view)))
    for at in range(0, struct.unpack("iL", answer)[0], _IFREQ_BYTES):
        name = bytes(space[at : at + 16]).partition(b"\0")[0].decode()
        yield name.partition(":")[0], ipaddress.IPv4Address(bytes(space[at + 20 : at + 24]))


def _ipv6() -> Iterator[tuple[str, ipaddress.IPv6Address]]:
    """Yield (device, address), from ``/proc/net/if_inet6``."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        digits, *_, name = line.split()
        yield name, ipaddress.IPv6Address(bytes.fromhex(digits))


def _rdma(root: Path = Path("/sys/class/infiniband")) -> tuple[str, ...]:
    """Return UCX's names of the RDMA devices: device and port."""
    return tuple(sorted(f"{port.parent.parent.name}:{port.name}" for port in root.glob("*/ports/*")))
