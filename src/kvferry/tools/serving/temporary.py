"""Temporary folders for engines and their logs."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from pathlib import Path

from kvferry.errors import ConfigError

# Longest path of a Unix socket, in bytes: 108 in sockaddr_un, with a zero at the end.
_LONGEST_SOCKET = 107
# vLLM names sockets in the temporary folder by random UUIDs.
_SOCKET = "/00000000-0000-4000-8000-000000000000"


def temporary_folder(prefix: str) -> Path:
    """Create a temporary folder that only this user can enter.

    Raises:
        ConfigError: the folder cannot be created.
    """
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
