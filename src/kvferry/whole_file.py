"""Write files as a whole: a write that fails, for example on a full disk, leaves no part of a file behind."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write a text to a file in UTF-8. An existing file keeps its permissions, and its content on a failure.

    A symbolic link is followed. A device or a pipe is written to directly.
    """
    path = path.resolve()
    mode = path.stat().st_mode if path.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        path.write_text(text, encoding="utf-8")
        return
    beside = _write_beside(path, text, 0o666)
    try:
        if mode is not None:
            beside.chmod(stat.S_IMODE(mode))
        beside.replace(path)
    except OSError:
        beside.unlink()
        raise


def create_private_file(path: Path, text: str) -> None:
    """Write a text to a new file in UTF-8. Only its owner can read it.

    Raises:
        FileExistsError: there is a file, or a symbolic link, at this path.
    """
    beside = _write_beside(path, text, 0o600)
    try:
        # An empty file takes the name first, because a rename would replace a file of somebody else.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        beside.replace(path)
    except OSError:
        beside.unlink()
        raise


def _write_beside(path: Path, text: str, mode: int) -> Path:
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Before the rename: after a crash, some file systems have the new name without the content.
            os.fsync(file.fileno())
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return beside
