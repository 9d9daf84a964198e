"""Machines that mount one directory over NFS: kernels in user mode over this machine's files, and a server.

The kernel of a test machine seldom has an NFS client. User-mode Linux is a kernel that runs as a process.
Debian's has the client, and each such machine has caches and locks of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.ended import end
from support.namespaces import NotPermitted, host_alone

PACKAGES = {
    "linux.uml": "user-mode-linux",
    "ganesha.nfsd": "nfs-ganesha-vfs",
    "ip": "iproute2",
    "setpriv": "util-linux",
}
# Kills the program when this process has ended, however it ends.
_WITH_US = ("setpriv", "--pdeathsig", "KILL")
LEASE_SECONDS = 10
"""Time after which the server gives away the locks of a machine that is gone."""
_TESTS = Path(__file__).parents[2]
_SERVER = """
NFS_CORE_PARAM { Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; }
NFSV4 { Graceless = true; Lease_Lifetime = %(lease)s; Minor_Versions = 1, 2; RecoveryRoot = %(recovery)s; }
NFS_KRB5 { Active_krb5 = false; }
EXPORT {
  Export_Id = 1; Path = %(path)s; Pseudo = /shared; Protocols = 4; Transports = TCP; SecType = sys;
  Access_Type = RW; Squash = No_Root_Squash; FSAL { Name = VFS; }
}
LOG { Default_Log_Level = WARN; }
"""


class Machine:
    """A machine that runs one program of the tests, with the directory mounted at `guest.MOUNTED`."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self.log = name, log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lose_power(self) -> None:
        """Kill the machine; the server does not hear of it."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def on(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None


class ServerEnded(Exception):
    """The NFS server has crashed: nfs-ganesha 4.3 does so in one of a dozen runs."""


class Network:
    """The server, and the machines that reach it."""

    def __init__(self, space: str, folder: Path, server: subprocess.Popen[bytes]) -> None:
        self._space, self._folder, self._server = space, folder, server
        self._machines: list[Machine] = []

    def start(self, name: str, program: str, *arguments: str) -> Machine:
        """Start a machine that runs ``program``, a module's function, with the directory mounted.

        Args:
            name: its host name.
            program: module and function, as in ``support.sharing:work``.
            arguments: of the function.
        """
        number = len(self._machines) + 1
        here, there = f"10.179.{number}.1", f"10.179.{number}.2"
        self._ip("tuntap", "add", f"kvf{number}", "mode", "tap")
        self._ip("address", "add", f"{here}/24", "dev", f"kvf{number}")
        self._ip("link", "set", f"kvf{number}", "up")
        words = [sys.executable, "-m", "support.nfs.guest", name, here, there, program, *arguments]
        init = self._folder / f"{name}.init"
        path = os.pathsep.join([str(_TESTS), str(_TESTS.parent / "src")])
        init.write_text(
            f"#!/bin/sh\nexport PATH={os.environ['PATH']} PYTHONPATH={path} PYTHONDONTWRITEBYTECODE=1\n"
            f"exec {' '.join(repr(word) for word in words)}\n"
        )
        init.chmod(0o755)
        command = [*_WITH_US, "ip", "netns", "exec", self._space, "linux.uml", "mem=512M", "quiet"]
        command += ["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw", f"init={init}"]
        command += ["con=null", "con0=fd:0,fd:1", "ssl=null", f"uml_dir={self._folder}", f"umid={name}"]
        command += [f"vec0:transport=tap,ifname=kvf{number},depth=128,gro=1"]
        self._machines.append(Machine(name, command, self._folder / f"{name}.log"))
        return self._machines[-1]

    def check(self) -> None:
        """Raise ServerEnded if the server has ended."""
        if (code := self._server.poll()) is not None:
            raise ServerEnded(f"the NFS server ended with code {code}")

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", "-n", self._space, *arguments], check=True, capture_output=True, timeout=10)

    def close(self) -> None:
        for machine in self._machines:
            machine.lose_power()


@contextmanager
def shared_over_nfs(path: Path, folder: Path) -> Iterator[Network]:
    """Serve a directory of this machine over NFS 4 to machines that are started in the block.

    Args:
        path: the directory.
        folder: for logs and what else there is to write.

    Raises:
        NotPermitted: a program is not installed, or this user may not make networks.
    """
    for program, package in PACKAGES.items():
        if shutil.which(program) is None:
            raise NotPermitted(f"{program} is not installed; `make .venv/.nfs` installs Debian's {package}")
    (folder / "recovery").mkdir()
    settings = folder / "ganesha.conf"
    settings.write_text(_SERVER % {"path": path, "recovery": folder / "recovery", "lease": LEASE_SECONDS})
    log, errors = folder / "ganesha.log", folder / "ganesha.errors"
    with host_alone() as space, errors.open("wb") as output:
        command = [*_WITH_US, "ip", "netns", "exec", space, "ganesha.nfsd", "-F", "-L", str(log)]
        server = subprocess.Popen(
            [*command, "-f", str(settings), "-p", str(folder / "ganesha.pid")],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        network = Network(space, folder, server)
        try:
            yield network
        finally:
            network.close()
            end(server)
