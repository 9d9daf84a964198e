"""The first process of a user-mode machine: mounts the shared directory, runs a program, and shuts down."""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

MOUNTED = Path("/run/shared")
_LIBC = ctypes.CDLL(None, use_errno=True)
_FINIT_MODULE = 313  # x86-64's number; the C library has no function for it
_POWER_OFF = 0x4321FEDC
# In the order in which they need one another.
_MODULES = (
    "net/sunrpc/sunrpc", "fs/netfs/netfs", "fs/fscache/fscache", "fs/nfs_common/grace", "fs/lockd/lockd",
    "fs/nfs/nfs", "net/dns_resolver/dns_resolver", "fs/nfs/nfsv4",
)  # fmt: skip


def _mount(source: str, target: Path, kind: str, options: str = "") -> None:
    arguments = (word.encode() for word in (source, str(target), kind))
    if _LIBC.mount(*arguments, 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"{kind} {source} {options}")


def _load_modules() -> None:
    folder = Path("/usr/lib/uml/modules", os.uname().release, "kernel")
    for name in _MODULES:
        if (path := folder / f"{name}.ko").exists():
            with path.open("rb") as module:
                if _LIBC.syscall(_FINIT_MODULE, module.fileno(), b"", 0):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))


def _join_network(address: str) -> None:
    for command in ("link set lo up", "link set vec0 up", f"address add {address}/24 dev vec0"):
        subprocess.run(["ip", *command.split()], check=True)


def main(name: str, server: str, address: str, program: str, *arguments: str) -> None:
    """Set the machine up, and call a function of the tests."""
    for kind, target in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/run")):
        _mount(kind, Path(target), kind)
    socket.sethostname(name)
    _load_modules()
    _join_network(address)
    MOUNTED.mkdir()
    told = f"vers=4.2,proto=tcp,addr={server},clientaddr={address}"
    deadline = time.monotonic() + 30
    while True:
        try:
            _mount(f"{server}:/shared", MOUNTED, "nfs4", told)
            break
        except OSError:  # the server is starting
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    sys.stdout.write(Path("/proc/mounts").read_text())
    sys.stdout.flush()
    module, _, function = program.partition(":")
    getattr(importlib.import_module(module), function)(MOUNTED, *arguments)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        # The kernel of a machine stops if its first process ends.
        os.sync()
        _LIBC.reboot(_POWER_OFF)
