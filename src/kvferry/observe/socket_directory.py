"""Create, find and connect to the Unix sockets of a user's engines.

A socket gets its final name only once it listens. So if it refuses connections, its engine has ended.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from kvferry.common.errors import ConfigError
from kvferry.common.machine import require_posix

_SUFFIX, _UNFINISHED = ".sock", ".new"
_UNFINISHED_SECONDS = 60.0
"""Age of a socket without its final name, in seconds, from which its process is considered to be killed."""
_AGAIN_SECONDS = 0.02


def socket_directories() -> list[Path]:
    """Return the directories where engines' Unix sockets may be, in the order of preference.

    They may not exist. Engines create their socket in the first one. Clients look in all of them.

    Raises:
        ConfigError: this system has no users, or engines cannot run on it.
    """
    require_posix("asking an engine for the trace of a request")
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    shared = Path(f"/tmp/kvferry-{os.getuid()}")  # noqa: S108 - users check it
    # A client may have the variable set where the engine has not.
    return [runtime / "kvferry", shared] if os.path.isdir(runtime) else [shared]  # noqa: PTH112 - never raises


def make_directory() -> Path:
    """Return the directory in which engines create their Unix sockets. Create it if it does not exist.

    Raises:
        ConfigError: the directory cannot be created, or `check_directory` rejects it.
    """
    directory = socket_directories()[0]
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        check_directory(directory)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"cannot make {directory}: {reason}; set XDG_RUNTIME_DIR to a directory that is yours"
        ) from error
    return directory


def check_directory(directory: Path) -> None:
    """Check that a directory belongs to this user and that nobody else may enter it.

    Raises:
        ConfigError: the directory belongs to another user, other users may enter it, or it is not a
            directory.
        OSError: the status of the directory cannot be read.
    """
    # Not `stat`: in /tmp, another user may have made a link of this name.
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{directory} is no directory; remove it, or set XDG_RUNTIME_DIR")
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"{directory} belongs to user {found.st_uid}, expected {os.getuid()}; "
            "set XDG_RUNTIME_DIR to a directory that is yours"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"{directory} has mode {stat.S_IMODE(found.st_mode):o}, expected 700, so that nobody else can "
            f"ask; chmod 700 {directory}"
        )


def listen(directory: Path, name: str) -> tuple[socket.socket, Path]:
    """Create a listening Unix socket, and return it and its path.

    Args:
        directory: directory that `check_directory` has accepted.
        name: file name of the socket without its suffix.

    Raises:
        ConfigError: the socket cannot be created.
    """
    path, before = directory / f"{name}{_SUFFIX}", directory / f"{name}{_UNFINISHED}"
    listening = None
    try:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(before))
        listening.listen(8)
        # Only now has the socket its final name, so whoever finds it can connect.
        before.rename(path)
    except OSError as error:
        if listening is not None:
            listening.close()
        with suppress(OSError):
            before.unlink()
        raise ConfigError(
            f"cannot listen on {path}: {error.strerror or error}; set XDG_RUNTIME_DIR to a directory where "
            "sockets can be made, of a shorter name"
        ) from error
    return listening, path


def engine_sockets(directory: Path) -> list[Path]:
    """Return the paths of the engines' Unix sockets in a directory; empty if there is no such directory.

    Raises:
        ConfigError: `check_directory` rejects the directory, or the directory cannot be read.
    """
    try:
        check_directory(directory)
        found = sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"cannot look into {directory}: {os.strerror(error.errno or 0)}") from error
    for path in found:
        with suppress(OSError):
            # Its engine was killed before the rename.
            if path.suffix == _UNFINISHED and time.time() - path.lstat().st_mtime > _UNFINISHED_SECONDS:
                path.unlink()
    return [path for path in found if path.suffix == _SUFFIX]


def connect(path: Path, until: float) -> socket.socket | None:
    """Connect to a socket of `engine_sockets`. If the engine has ended, remove the socket and return None.

    Args:
        until: deadline in monotonic seconds for an engine whose queue of new connections is full.

    Raises:
        OSError: the queue stayed full until the deadline (TimeoutError), or the connection failed for another
            reason, such as missing permissions.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(0)
    while True:
        try:
            connection.connect(str(path))
        except BlockingIOError:
            # The engine's queue of connections is full.
            if time.monotonic() < until:
                time.sleep(_AGAIN_SECONDS)
                continue
            connection.close()
            raise TimeoutError("too many questions wait for it") from None
        # A socket refuses connections only if its engine has ended: it listened before it had this name.
        except (ConnectionRefusedError, FileNotFoundError):
            connection.close()
            path.unlink(missing_ok=True)
            return None
        except OSError:
            connection.close()
            raise
        return connection


def remove_stale(directory: Path) -> None:
    """Remove the sockets of engines that have ended. Raise ConfigError as `engine_sockets` does."""
    for path in engine_sockets(directory):
        with suppress(OSError):
            if (connection := connect(path, 0.0)) is not None:
                connection.close()
