"""A trial write to a directory, which leaves nothing behind."""

from __future__ import annotations

import errno
import os
import secrets

from kvferry.operating_system import fcntl
from kvferry.tiers.files.direct_io import set_direct, whole_pages


def try_directory(root: str) -> bool:
    """Create, lock, write and remove a file of 4096 bytes. Return whether direct I/O worked.

    Raises:
        OSError: the file cannot be created, locked, written or removed.
    """
    page = whole_pages(4096)
    page[:] = bytes(4096)
    name = f"{root}/.kvferry-trial.{secrets.token_hex(8)}"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        direct = set_direct(fd, on=True)
        try:
            os.pwrite(fd, page, 0)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            direct = set_direct(fd, on=False)
            os.pwrite(fd, page, 0)
    finally:
        os.close(fd)
        os.unlink(name)
    return direct
