"""Make a process end when its parent ends."""

from __future__ import annotations

import ctypes
import signal

from kvferry.operating_system import is_linux

_PR_SET_PDEATHSIG = 1

# Loaded here, because a child between fork and exec must not load libraries. Windows has no such library.
_libc = ctypes.CDLL(None, use_errno=True) if is_linux() else None


def die_with_parent() -> None:
    """Make the kernel kill this child process when the thread that started it ends."""
    assert _libc is not None  # noqa: S101 - only Linux starts such processes
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
