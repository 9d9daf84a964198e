"""Signals that stop a process at safe points, and its folders of temporary files."""

from __future__ import annotations

import getpass
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Self

from kvferry.common.errors import ConfigError

# A terminal sends it when it is closed. Windows has none.
_HANG_UP = getattr(signal, "SIGHUP", None)
_EXIT_CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 0}
if _HANG_UP is not None:
    _EXIT_CODES[_HANG_UP] = 129
# Longest path of a Unix socket, in bytes: 108 in sockaddr_un, with a zero at the end.
_LONGEST_SOCKET = 107
# vLLM names sockets in the temporary folder by random UUIDs.
_SOCKET = "/00000000-0000-4000-8000-000000000000"


class StopRequested(Exception):
    """Raised by `StopSignals.check` if a signal asked the process to stop."""


class StopSignals:
    """Context manager that handles SIGINT, SIGTERM and SIGHUP while the ``with`` block runs.

    The first signal is recorded in `received`, and raises KeyboardInterrupt only inside an `interruptible`
    block. A second signal raises KeyboardInterrupt at once, and sets `repeated`. Later signals are ignored.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.repeated = False
        self._interruptible = False
        self._before: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self.received] if self.received is not None else 0

    def check(self) -> None:
        if self.received is not None:
            raise StopRequested

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the first signal raise KeyboardInterrupt inside this ``with`` block.

        Raises:
            StopRequested: a signal was received before the block, or its KeyboardInterrupt was dropped.
        """
        self._interruptible = True
        try:
            self.check()
            yield
        finally:
            self._interruptible = False
        self.check()

    def __enter__(self) -> Self:
        # ``nohup`` ignores SIGHUP, and so it stays.
        for number in _EXIT_CODES:
            if number != _HANG_UP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # signal.signal returned it

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            if self._interruptible:
                raise KeyboardInterrupt
        # A third signal must not interrupt the killing of the engines.
        elif not self.repeated:
            self.repeated = True
            raise KeyboardInterrupt


def temporary_folder(prefix: str) -> Path:
    """Create a temporary folder that only this user can enter. Raise ConfigError if that fails."""
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise _no_place(error) from error


def temporary_for_engines() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder whose path is short enough for the sockets that engines create there.

    The folder is removed when the returned object is cleaned up.

    Raises:
        ConfigError: the folder cannot be created, or its path is too long.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="kvferry-", ignore_cleanup_errors=True)
    except OSError as error:
        raise _no_place(error) from error
    over = len(os.fsencode(folder.name)) + len(_SOCKET) - _LONGEST_SOCKET
    if over > 0:
        folder.cleanup()
        raise ConfigError(
            f"TMPDIR is {tempfile.gettempdir()}, {over} bytes too long for the sockets that engines make "
            "there; set it to a directory of a shorter name"
        )
    return folder


def _no_place(error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot make a folder for temporary files: {error.strerror}; set TMPDIR to a directory with room "
        "that you may write"
    )


def compiled_code() -> str:
    """Return the path of the folder in which torch's compiler keeps compiled code by default."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, which occurs in containers
        user = f"uid_{os.getuid()}"
    return str(Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)))
