"""Two hosts on this machine: network namespaces joined by a link of a given rate."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.common.errors import ConfigError
from kvferry.tools.measuring.producer_process import ProducerProcess
from kvferry.tools.measuring.simulated import SimulatedEngine

_QUEUE_MILLISECONDS = 50
_BURST_BYTES = 1 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)
_NETWORK, _MOUNTS = 0x40000000, 0x00020000
"""CLONE_NEWNET of setns(2) and CLONE_NEWNS of unshare(2). Python has these calls since 3.12."""
_RECURSIVE, _SLAVE = 0x4000, 0x80000
"""MS_REC and MS_SLAVE of mount(2)."""


@dataclass(frozen=True, slots=True)
class LinkedHost:
    """One of two hosts.

    Attributes:
        name: name of the network namespace.
        address: IP address of the host on the link.
        device: network device at the host's end of the link.
    """

    name: str
    address: str
    device: str

    def command(self, command: list[str]) -> list[str]:
        """Return the command line that runs a command on this host."""
        return ["ip", "netns", "exec", self.name, *command]

    def enter(self) -> None:
        """Move the calling thread to this host: its new connections, threads and processes begin there."""
        with Path("/run/netns", self.name).open() as namespace:
            _call("setns", namespace.fileno(), _NETWORK)
        # UCX reads the network devices from /sys, which shows those of the namespace that mounted it.
        _call("unshare", _MOUNTS)
        _call("mount", b"none", b"/", None, _RECURSIVE | _SLAVE, None)
        _call("mount", self.name.encode(), b"/sys", b"sysfs", 0, None)

    @property
    def network(self) -> dict[str, str]:
        """Return the variables that make UCX use TCP over the link."""
        return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": self.device}

    def limit(self, gigabits: float) -> None:
        """Limit the rate at which the host sends over the link.

        Args:
            gigabits: rate in Gbit/s; 0 for no limit.
        """
        _run("tc", "-n", self.name, "qdisc", "del", "dev", self.device, "root", check=False)
        if gigabits:
            rate = ("rate", f"{gigabits:g}gbit", "burst", str(_BURST_BYTES))
            queue = ("latency", f"{_QUEUE_MILLISECONDS}ms")
            _run("tc", "-n", self.name, "qdisc", "add", "dev", self.device, "root", "tbf", *rate, *queue)


@contextmanager
def linked_hosts() -> Iterator[tuple[LinkedHost, LinkedHost]]:
    """Yield two hosts that reach only each other. They are removed at the end of the ``with`` block.

    Raises:
        ConfigError: this user or machine cannot create network namespaces.
    """
    here, there = (LinkedHost(f"kvferry-bench-{os.getpid()}-{n}", f"10.179.0.{n}", f"kvb{n}") for n in (1, 2))
    try:
        try:
            for host in (here, there):
                _run("ip", "netns", "add", host.name)
            peer = ("peer", "name", there.device, "netns", there.name)
            _run("ip", "link", "add", here.device, "netns", here.name, "type", "veth", *peer)
            for host in (here, there):
                _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", host.device)
                for device in ("lo", host.device):
                    _run("ip", "-n", host.name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
            raise ConfigError(f"two network namespaces cannot be joined here: {said}; run as root") from error
        yield here, there
    finally:
        for host in (here, there):
            _run("ip", "netns", "delete", host.name, check=False)


def _call(function: str, *arguments: object) -> None:
    """Call a function of the C library. Raise OSError if it fails."""
    if getattr(_LIBC, function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def start_producer(
    there: LinkedHost, here: LinkedHost, engines: Sequence[SimulatedEngine]
) -> ProducerProcess:
    """Start a producer on the other host than the calling thread's, `here`."""
    there.enter()
    try:
        return ProducerProcess(engines, there.network, there.address)
    finally:
        here.enter()


def on_linked_hosts(work: Callable[[LinkedHost, LinkedHost], Any]) -> Any:
    """Run a function of two linked hosts in a thread on the second one, and return its result.

    The thread may enter the first host for a while: what it starts then runs there.

    Raises:
        ConfigError: this user or machine cannot create network namespaces.
    """
    found: list[Any] = []
    failed: list[BaseException] = []
    with linked_hosts() as hosts:

        def run() -> None:
            try:
                hosts[1].enter()
                found.append(work(*hosts))
            except BaseException as error:  # noqa: BLE001 - raised again below
                failed.append(error)

        # Only a thread of its own can live on another host.
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True, text=True, timeout=10)
