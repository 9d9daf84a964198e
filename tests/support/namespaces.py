"""Hosts on one machine: network namespaces joined by a bridge."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO
from uuid import uuid4

_PREFIX = "kvferry-test-"
OTHER_NETWORK = "10.178.0."
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000


class NotPermitted(Exception):
    """This machine, or user, cannot have network namespaces."""


@dataclass(frozen=True)
class Host:
    """A namespace.

    Attributes:
        name: of the namespace.
        address: its own, on the link.
        device: its end of the link.
    """

    name: str
    address: str
    device: str

    def command(self, *command: str) -> list[str]:
        """The command line that runs this one there, with a /sys that shows its devices, and a boot id."""
        return [
            "ip",
            "netns",
            "exec",
            self.name,
            "sh",
            "-c",
            f'{_own_boot(self.name)} && exec "$@"',
            "sh",
            *command,
        ]

    @contextmanager
    def visited(self) -> Iterator[None]:
        """What this thread connects to, while the block runs, it connects to from there."""
        with Path("/proc/thread-self/ns/net").open() as home:
            with Path("/run/netns", self.name).open() as there:
                _setns(there)
            try:
                yield
            finally:
                _setns(home)

    def received_bytes(self) -> int:
        """What has come in over the link so far."""
        return int(
            _ip("netns", "exec", self.name, "cat", f"/sys/class/net/{self.device}/statistics/rx_bytes")
        )

    def cut(self) -> None:
        """Take its end of the link down."""
        _ip("-n", self.name, "link", "set", self.device, "down")

    def mend(self) -> None:
        """Take it up again."""
        _ip("-n", self.name, "link", "set", self.device, "up")


@contextmanager
def hosts_on_a_network(count: int) -> Iterator[tuple[Host, ...]]:
    """Hosts that reach each other and nothing else, gone when the block is left.

    Each has a second network device, of address 10.178.0.1 and so on, that leads nowhere.

    Raises:
        NotPermitted: they cannot be made here.
    """
    _sweep()
    own = f"{_PREFIX}{os.getpid()}-"
    hosts = tuple(Host(f"{own}{n}", f"10.177.0.{n}", f"kvf{n}") for n in range(1, count + 1))
    switch = f"{own}switch"
    names = (switch, *(host.name for host in hosts))
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            for host in hosts:
                _boot_file(host.name).write_text(f"{uuid4()}\n")
                peer = ("peer", "name", host.device, "netns", switch)
                _ip("link", "add", host.device, "netns", host.name, "type", "veth", *peer)
                _ip("-n", switch, "link", "set", host.device, "master", "bridge")
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotPermitted(f"network namespaces cannot be made here: {_said(error)}") from error
        for device in ("bridge", *(host.device for host in hosts)):
            _ip("-n", switch, "link", "set", device, "up")
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.name, "link", "add", "other", "type", "veth", "peer", "name", "nowhere")
            _ip("-n", host.name, "address", "add", f"{OTHER_NETWORK}{host.address[-1]}/24", "dev", "other")
            for device in ("lo", host.device, "other", "nowhere"):
                _ip("-n", host.name, "link", "set", device, "up")
        yield hosts
    finally:
        for host in hosts:
            _boot_file(host.name).unlink(missing_ok=True)
        for name in {*names} & {*_existing()}:
            _ip("netns", "delete", name)


@contextmanager
def host_alone() -> Iterator[str]:
    """Give the name of a namespace with nothing but a loopback device, gone when the block is left.

    Raises:
        NotPermitted: it cannot be made here.
    """
    _sweep()
    name = f"{_PREFIX}{os.getpid()}-alone"
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotPermitted(f"network namespaces cannot be made here: {_said(error)}") from error
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        _ip("netns", "delete", name)


def enter(name: str) -> None:
    """Move this process, and those it starts, into a namespace, as `Host.command` does."""
    with Path("/run/netns", name).open() as there:
        _setns(there)
    if _LIBC.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "cannot have a /sys of its own")
    for command in (["--make-rslave", "/"], ["-t", "sysfs", name, "/sys"]):
        subprocess.run(["mount", *command], check=True, timeout=10)
    subprocess.run(["sh", "-c", _own_boot(name)], check=True, timeout=10)


def _boot_file(name: str) -> Path:
    # Not in a temporary folder: processes of a host may have one of their own.
    return Path("/run", f"{name}.boot")


def _own_boot(name: str) -> str:
    """Return the shell command that gives this process and its children the boot id of another machine."""
    return f"mount --bind {_boot_file(name)} /proc/sys/kernel/random/boot_id"


def _setns(namespace: TextIO) -> None:
    if _LIBC.setns(namespace.fileno(), _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace.name}")


def _sweep() -> None:
    """Remove what a run that was killed has left."""
    for name in _existing():
        if name.startswith(_PREFIX) and not Path("/proc", name.split("-")[2]).exists():
            _ip("netns", "delete", name)
            _boot_file(name).unlink(missing_ok=True)


def _existing() -> list[str]:
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10).stdout


def _said(error: Exception) -> str:
    return error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
