"""Temporary folders for engines and their logs."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from pathlib import Path

from kvferry.errors import ConfigError

_LONGEST_SOCKET = 107
"""Bytes that the path of a Unix socket may have."""
_SOCKET = "/00000000-0000-4000-8000-000000000000"
"""Name of an engine's socket in vLLM's folder for temporary files."""


def temporary_folder(prefix: str) -> Path:
    """Create a temporary folder that only this user can enter.

    Raises:
        ConfigError: there is no place for temporary files.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise _no_place(error) from error


def temporary_for_engines() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder whose path is short enough for engines' sockets.

    Raises:
        ConfigError: there is no place for it, or its path would be too long.
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
    """Return the folder where torch keeps compiled code by default."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as a container may run as
        user = f"uid_{os.getuid()}"
    return str(Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)))
