"""Open and create plain files and folders, and refuse everything else.

A user who can write to a directory can put a link, a pipe, a device or a folder in place of a file. Below the
directory, these functions follow no link, and do not wait for a pipe or a device. The path to the directory
itself may contain links.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

# Only this user, because a chunk reveals its prompt.
FILE_MODE, FOLDER_MODE = 0o600, 0o700

# Errors when a link, a socket or pipe, a folder, or a device without a driver is opened as a plain file.
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV)


class NotRegular(OSError):
    """Raised if something else is found where a regular file or a directory is expected, such as a link."""


def open_regular(path: str, flags: int) -> int:
    """Open a plain file with flags of `os.open`, without following a link or waiting for a pipe or device.

    Raises:
        NotRegular: the path is not a plain file.
        OSError: the file cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotRegular(error.errno, "expected a plain file", path) from error
        raise
    try:
        # The flags refuse links only. A pipe or device opens at once, and is recognized here.
        plain = stat.S_ISREG(os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    if not plain:
        os.close(fd)
        raise NotRegular(errno.ENXIO, "expected a plain file", path)
    return fd


def read_regular(path: str, most: int) -> bytes:
    """Return the first `most` bytes of a plain file, or fewer if the file is shorter."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read(most)


def is_regular(path: str) -> bool:
    """Return whether a path is a plain file, not a link."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def check_folders(root: str, path: str) -> None:
    """Check that the folders between `root` and a file are plain folders. Root and file are not checked.

    Raises:
        NotRegular: a folder on the path is a link or another kind of file.
        OSError: a folder on the path is missing, or its status cannot be read.
    """
    while len(path := os.path.dirname(path)) > len(root):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotRegular(errno.ENOTDIR, "expected a plain folder", path)


def make_folder(root: str, folder: str) -> None:
    """Create a folder below `root`, and its missing parents below `root`.

    Raises:
        NotRegular: the name of one of the folders is taken by a link, a file or a device.
        OSError: a folder cannot be created, or `root` is missing.
    """
    if len(above := os.path.dirname(folder)) > len(root):
        make_folder(root, above)
    with suppress(FileExistsError):
        os.mkdir(folder, FOLDER_MODE)
    # mkdir also says that the name exists if it is a link.
    check_folders(root, f"{folder}/")


def sync_folder(folder: str) -> None:
    """Flush the entries of a folder to the disk, so that new names in it survive a crash."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
