"""Open a directory of the file tier: set its capacity, remove leftovers, and write its notes.

The *marker* is a file with the version of the directory's layout. A *note* is a file that describes a
namespace to people.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import stat
from contextlib import suppress

from kvferry.common.errors import ConfigError
from kvferry.common.machine import fcntl
from kvferry.common.units import format_bytes
from kvferry.keys.namespace import Namespace
from kvferry.tiers.files.chunk_file import (
    is_regular,
    make_folder,
    read_regular,
    set_direct,
    whole_pages,
    write_all,
)
from kvferry.tiers.files.full_disk import OUT_OF_ROOM, DiskRoom, shortage
from kvferry.tiers.files.ledger import HeldLedger, Ledger, LockTimeout
from kvferry.tiers.files.space import DirectorySpace
from kvferry.tiers.paths import (
    DIRECTORY_VERSION,
    ENCRYPTED_DIRECTORY_VERSION,
    MARKER,
    NAMESPACE_NOTE,
    QUARANTINE,
)

_SIGNATURE = "file tier"

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH

# The default capacity of a directory is the free space divided by this.
DEFAULT_CAPACITY_DIVISOR = 10

# Time to wait for the ledger's lock. Another process holds it while it counts the files of a large directory.
PATIENCE_SECONDS = 60.0

# Two folders, the marker and the note need an inode each.
_MOST_EVICTED = 4

_log = logging.getLogger(__name__)


def check_directory(root: str, encrypted: bool | None = None) -> bool | None:
    """Raise ConfigError unless a directory exists, and this release can use its layout.

    `encrypted` says whether the chunks in it must be encrypted; None if both can be used. Return whether they
    are; None if there is no marker.
    """
    if not os.path.isdir(root):
        found = "is no directory" if os.path.exists(root) else "does not exist"
        raise ConfigError(f"file tier: {root} {found}; make the directory, or mount the disk it is on")
    version = read_marker(root)
    if version is None:
        return None
    if version not in (DIRECTORY_VERSION, ENCRYPTED_DIRECTORY_VERSION):
        raise ConfigError(
            f"file tier: {root} was written as directory version {version}, this release knows versions "
            f"{DIRECTORY_VERSION} and {ENCRYPTED_DIRECTORY_VERSION}; name another directory, or empty this "
            "one with the release that wrote it"
        )
    is_encrypted = version == ENCRYPTED_DIRECTORY_VERSION
    if encrypted is not None:
        check_encryption(root, found=is_encrypted, expected=encrypted)
    return is_encrypted


def check_encryption(root: str, *, found: bool, expected: bool) -> None:
    """Raise ConfigError if the chunks of a directory are encrypted and must not be, or vice versa."""
    if found is expected:
        return
    if found:
        raise ConfigError(
            f"file tier: the chunks in {root} are encrypted, and the tier has no key_file; set key_file, or "
            "name another directory"
        )
    raise ConfigError(
        f"file tier: the chunks in {root} are not encrypted, and the tier has a key_file; name another "
        f"directory, or remove them with: kvferry cache clear {root}"
    )


def check_writable(root: str, encrypted: bool) -> None:
    """Check as `check_directory` does, and that files can be listed, created, locked and written there."""
    check_directory(root, encrypted)
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
    """Return the version of a directory's layout; None if there is no marker."""
    path = f"{root}/{MARKER}"
    try:
        found = json.loads(read_regular(path, 4096))
        if found["kvferry"] != _SIGNATURE:
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
    """Return why other users can write to a directory; empty if only this user and root can."""
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


def open_directory(
    root: str,
    ledger: Ledger,
    space: DirectorySpace,
    namespace: Namespace,
    capacity: int | None,
    write_per_day: int | None = None,
    *,
    encrypted: bool = False,
) -> None:
    """Prepare a directory for a file tier: sweep, count, evict down to the capacity, write the notes.

    `check_directory` has checked `root`. Mutates the ledger: capacity, limit on writes, `after_loss` and
    `after_swap`.

    Raises:
        ConfigError: the directory cannot be read or written, other processes held the lock for too long,
            the directory is encrypted and must not be, or vice versa, or the capacity is too small for marker
            and note, or larger than the free bytes plus those in use.
    """

    def recreate(held_ledger: HeldLedger) -> None:
        # Notes are only for people. If one cannot be written, chunks are still stored.
        with suppress(ConfigError, OSError):
            _create_missing_files(namespace, held_ledger, space, encrypted)

    def check_again() -> None:
        try:
            check_directory(root, encrypted)
        except ConfigError as error:
            raise OSError(errno.ESTALE, str(error)) from error

    try:
        # What others write in an encrypted directory fails its tags.
        if not encrypted and (who := writable_by_others(root)):
            _log.warning(
                "file tier %s: %s; a chunk that they write is used like the engine's own: let only this user "
                "write there (chmod 700), or see that only engines run as them",
                root,
                who,
            )
        with ledger.held(PATIENCE_SECONDS) as held_ledger:
            # First, or a number that a killed process left would be taken as used and limit the capacity.
            space.settle(held_ledger)
            held_ledger.limit(_capacity(root, held_ledger, capacity))
            if write_per_day is not None:
                held_ledger.limit_writes(write_per_day)
                ledger.write_per_day = write_per_day
            ledger.capacity = held_ledger.capacity
            space.make_room(held_ledger)
            _make_way_and_create(namespace, held_ledger, space, encrypted)
            # Again: another engine may have written the marker since the first check.
            check_directory(root, encrypted)
        ledger.after_swap = check_again
        # If an operator clears the directory, engines that still use it write its folders and notes again.
        ledger.after_loss = recreate
    except LockTimeout as error:
        raise ConfigError(f"file tier: {error}; find the process that holds it, and end it") from error
    except OSError as error:
        raise unusable_directory(root, error) from error


def _capacity(root: str, held_ledger: HeldLedger, requested: int | None) -> int:
    free = DiskRoom.of(root).free
    if requested is None:
        return held_ledger.capacity or (free + held_ledger.used) // DEFAULT_CAPACITY_DIVISOR
    if requested > free + held_ledger.used:
        raise ConfigError(
            f"file tier: {format_bytes(free)} free and {format_bytes(held_ledger.used)} of cache under "
            f"{root}, capacity asks for {format_bytes(requested)}; lower the capacity or free space"
        )
    return requested


def _make_way_and_create(
    namespace: Namespace, held_ledger: HeldLedger, space: DirectorySpace, encrypted: bool
) -> None:
    """Create missing files. If the file system is full, evict a few files for them."""
    for left in reversed(range(_MOST_EVICTED + 1)):
        try:
            _create_missing_files(namespace, held_ledger, space, encrypted)
        except OSError as error:
            full = left and error.errno in OUT_OF_ROOM
            if not (full and space.evict_listed(held_ledger, size=1)):
                raise
        else:
            return


def _create_missing_files(
    namespace: Namespace, held_ledger: HeldLedger, space: DirectorySpace, encrypted: bool
) -> None:
    root, folder = space.root, f"{space.root}/{namespace.digest.hex()}"
    make_folder(root, f"{root}/{QUARANTINE}")
    make_folder(root, folder)
    version = ENCRYPTED_DIRECTORY_VERSION if encrypted else DIRECTORY_VERSION
    marker = json.dumps({"kvferry": _SIGNATURE, "directory": version}, indent=1, sort_keys=True)
    _write_note(f"{root}/{MARKER}", marker + "\n", held_ledger, space)
    _write_note(f"{folder}/{NAMESPACE_NOTE}", namespace.note, held_ledger, space)


def _write_note(path: str, text: str, held_ledger: HeldLedger, space: DirectorySpace) -> None:
    """Write a small file if it does not exist, and charge its bytes."""
    if is_regular(path):
        return
    data = text.encode("ascii")
    if not space.make_room(held_ledger, len(data)):
        needed = format_bytes(held_ledger.used + len(data))
        raise ConfigError(
            f"file tier: a capacity of {format_bytes(held_ledger.capacity)} cannot hold the {needed} that "
            "are needed before the first chunk; raise the capacity"
        )
    # Under a temporary name first: a marker that a crash cut off would make the directory unusable.
    fd, temporary = space.create(held_ledger, path, len(data))
    try:
        write_all(fd, [data])
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        held_ledger.release(len(data), path)
        raise
    finally:
        os.close(fd)
