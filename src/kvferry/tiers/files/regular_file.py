"""Opening and making what is a plain file or folder in its place, and nothing else.

Whoever may write to a directory may leave there a link, a pipe, a device, or a folder in place of a file.
None is followed or waited for, below the directory itself, which may be reached by links.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

FILE_MODE, FOLDER_MODE = 0o600, 0o700
"""The user's alone: a chunk tells what a prompt was."""

# Errors of a file that is no plain one: a link, a socket or a pipe, a folder, a device without a driver.
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV)


class NotRegular(OSError):
    """There is something else in place of a file or folder."""


def open_regular(path: str, flags: int) -> int:
    """Open a file, at once; one that is made has mode 0600.

    Raises:
        NotRegular: it is no plain file.
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotRegular(error.errno, "expected a plain file", path) from error
        raise
    try:
        plain = stat.S_ISREG(os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    if not plain:
        os.close(fd)
        raise NotRegular(errno.ENXIO, "expected a plain file", path)
    return fd


def read_regular(path: str, most: int) -> bytes:
    """The first `most` bytes of a file.

    Raises:
        NotRegular: it is no plain file.
        OSError: it cannot be read.
    """
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read(most)


def is_regular(path: str) -> bool:
    """Whether there is a plain file."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def check_folders(root: str, path: str) -> None:
    """See that a file lies below `root` and not elsewhere, by way of a link.

    Raises:
        NotRegular: there is no plain folder between them.
        OSError: one is missing, or cannot be looked at.
    """
    while len(path := os.path.dirname(path)) > len(root):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotRegular(errno.ENOTDIR, "expected a plain folder", path)


def make_folder(root: str, folder: str) -> None:
    """Make a folder, and those between it and `root`, where they are missing; with mode 0700.

    Raises:
        NotRegular: there is something else in its place.
        OSError: it cannot be made, or `root` is not there.
    """
    if len(above := os.path.dirname(folder)) > len(root):
        make_folder(root, above)
    with suppress(FileExistsError):
        os.mkdir(folder, FOLDER_MODE)
    check_folders(root, f"{folder}/")


def sync_folder(folder: str) -> None:
    """Flush a folder's entries to the disk.

    Raises:
        OSError: it cannot be opened or flushed.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
