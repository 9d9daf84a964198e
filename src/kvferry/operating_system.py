"""Modules and checks of the operating system.

Engines run on Linux. Commands such as `kvferry plan` also run on macOS and Windows. Windows lacks some
modules of the standard library. Import them from here: where they are missing, their first use raises
ConfigError.
"""

from __future__ import annotations

import os
import platform
from typing import Any, NoReturn

from kvferry.errors import ConfigError

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
]


class _MissingModule:
    """Stands for a module that this operating system lacks."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        """Raise ConfigError."""
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
