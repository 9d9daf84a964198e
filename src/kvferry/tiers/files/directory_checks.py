"""Checks of a directory, whether a file tier can use it, and who else can write there."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat

from kvferry.errors import ConfigError
from kvferry.operating_system import fcntl
from kvferry.tiers.files.direct_io import set_direct, whole_pages
from kvferry.tiers.files.full_disk import OUT_OF_ROOM, shortage
from kvferry.tiers.files.regular_file import read_regular
from kvferry.tiers.paths import DIRECTORY_VERSION, MARKER

SIGNATURE = "file tier"

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


def check_directory(root: str) -> None:
    """Check that a directory exists, and that this release can use it.

    Raises:
        ConfigError: the directory is missing, its layout has another version, or its marker is invalid.
    """
    if not os.path.isdir(root):
        found = "is no directory" if os.path.exists(root) else "does not exist"
        raise ConfigError(f"file tier: {root} {found}; make the directory, or mount the disk it is on")
    version = read_marker(root)
    if version is not None and version != DIRECTORY_VERSION:
        raise ConfigError(
            f"file tier: {root} was written as directory version {version}, this release knows version "
            f"{DIRECTORY_VERSION}; name another directory, or empty this one with the release that wrote it"
        )


def check_writable(root: str) -> None:
    """Check as `check_directory` does, and that files can be listed, created, locked and written there.

    Raises:
        ConfigError: a check failed.
    """
    check_directory(root)
    try:
        os.scandir(root).close()
        # A try, because no permission says that /proc, for example, has no room for files.
        try_directory(root)
    except OSError as error:
        # An engine evicts chunks of a full disk.
        if error.errno not in OUT_OF_ROOM:
            raise ConfigError(
                f"file tier: no file can be written to {root}: {error.strerror}; name a directory on a disk, "
                "and see to its owner, mode and mount"
            ) from error


def try_directory(root: str) -> bool:
    """Create, lock, write and remove a file of 4096 bytes. Return whether direct I/O worked."""
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
            # The device's blocks are larger than 4096 bytes: the page cache still works.
            if not direct or error.errno != errno.EINVAL:
                raise
            direct = set_direct(fd, on=False)
            os.pwrite(fd, page, 0)
    finally:
        os.close(fd)
        os.unlink(name)
    return direct


def read_marker(root: str) -> object | None:
    """Return the version of a directory's layout; None if there is no marker.

    Raises:
        ConfigError: the marker cannot be read or is invalid.
    """
    path = f"{root}/{MARKER}"
    try:
        found = json.loads(read_regular(path, 4096))
        if found["kvferry"] != SIGNATURE:
            raise KeyError
        version: object = found["directory"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"file tier: {path} was not written by kvferry; name another directory") from error
    except OSError as error:
        raise unusable_directory(root, error) from error
    return version


def writable_by_others(root: str) -> str:
    """Return why other users can write to a directory; empty if only this user and root can.

    Raises:
        OSError: the status of a folder cannot be read.
    """
    # Chunks have checksums but no signatures. So a user who can write to the directory, or can replace a
    # folder above it, controls the KV that engines use.
    path = os.path.realpath(root)
    while True:
        status = os.stat(path)
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to user {status.st_uid}"
        # In a folder with the sticky bit, such as /tmp, others can add entries, but not replace ours.
        if status.st_mode & _WRITABLE and (
            path == os.path.realpath(root) or not status.st_mode & stat.S_ISVTX
        ):
            return f"{path} has mode {stat.S_IMODE(status.st_mode):o}, so others can write there"
        if path == os.path.dirname(path):
            return ""
        path = os.path.dirname(path)


def unusable_directory(root: str, error: OSError) -> ConfigError:
    """Return a ConfigError with advice for the operator."""
    said, advice = error.strerror or str(error), "see to its owner, mode and mount"
    if error.errno in OUT_OF_ROOM:
        lacking, advice = shortage(root, error)
        said += f": {lacking}"
    return ConfigError(f"file tier: cannot use {root}: {said} ({error.filename or root}); {advice}")
