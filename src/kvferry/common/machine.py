"""Modules and checks of the operating system.

Engines run on Linux. Commands such as `kvferry plan` also run on macOS and Windows. Windows lacks some
modules of the standard library. Import them from here: where they are missing, their first use raises
ConfigError.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from kvferry.common.errors import ConfigError

__all__ = [
    "fcntl",
    "has_posix",
    "is_linux",
    "pwd",
    "require_linux",
    "require_posix",
    "resource",
    "termios",
    "tty",
    "usable_cores",
]


_THREADS = Path("/proc/self/task")
# Variables that make OpenMP bind threads.
_OPENMP_BINDS = frozenset({"GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND"})


class _MissingModule:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        # Python itself looks these up, for example to inspect a module.
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise _needs(f"{self._name}.{attribute}", "a POSIX system")


def _needs(what: str, system: str) -> ConfigError:
    here = platform.system() or "another system"
    return ConfigError(f"{what} needs {system}, and this is {here}; run it where engines run")


try:
    import fcntl
    import pwd
    import resource
    import termios
    import tty
except ModuleNotFoundError:
    missing: Any = _MissingModule
    fcntl, pwd, resource = missing("fcntl"), missing("pwd"), missing("resource")
    termios, tty = missing("termios"), missing("tty")


def is_linux() -> bool:
    """Return whether this machine runs Linux, the only system on which engines run."""
    return platform.system() == "Linux"


def usable_cores() -> set[int]:
    """Return the numbers of the cores that threads of this process may use; empty if this is not Linux.

    These are the cores of all threads, because some may be bound to one. OpenMP may have bound the first one
    before there were others. Then the cores of the process that started this one count, too.
    """
    threads = [int(thread.name) for thread in _THREADS.iterdir()] if is_linux() else []
    if threads and _OPENMP_BINDS & os.environ.keys() and (parent := multiprocessing.parent_process()):
        threads.append(parent.pid or 0)
    cores = set[int]()
    for thread in threads:
        with suppress(OSError):  # it may have ended
            cores |= os.sched_getaffinity(thread)
    return cores


def has_posix() -> bool:
    """Return whether this machine has users, permissions and Unix sockets, as POSIX systems have."""
    return hasattr(os, "geteuid")


def require_posix(what: str) -> None:
    """Raise ConfigError with the subject `what` unless this machine has a POSIX system."""
    if not has_posix():
        raise _needs(what, "a POSIX system")


def require_linux(what: str) -> None:
    """Raise ConfigError with the subject `what` unless this machine runs Linux."""
    if not is_linux():
        raise _needs(what, "Linux")


_PR_SET_PDEATHSIG = 1

# Loaded here, because a child between fork and exec must not load libraries. Windows has no such library.
_libc = ctypes.CDLL(None, use_errno=True) if is_linux() else None


def die_with_parent() -> None:
    """Make the kernel kill this child process when the thread that started it ends."""
    assert _libc is not None  # noqa: S101 - only Linux starts such processes
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
