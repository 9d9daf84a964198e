"""Functions that open a directory of the file tier: check it, set its capacity, and remove leftovers.

The *marker* is a file that contains the version of the directory's layout. A *note* is a file that describes
a namespace to people. *Leftovers* are temporary files of dead writers.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from contextlib import suppress

from kvferry.errors import ConfigError
from kvferry.keys.namespace import Namespace
from kvferry.tiers.files.direct_io import write_all
from kvferry.tiers.files.full_disk import OUT_OF_ROOM, DiskRoom, shortage
from kvferry.tiers.files.ledger import HeldLedger, Ledger
from kvferry.tiers.files.lock_handoff import LockTimeout
from kvferry.tiers.files.permissions import writable_by_others
from kvferry.tiers.files.regular_file import is_regular, make_folder, open_regular, read_regular
from kvferry.tiers.files.space import DirectorySpace
from kvferry.tiers.files.trial import try_directory
from kvferry.tiers.paths import DIRECTORY_VERSION, MARKER, NAMESPACE_NOTE, QUARANTINE, temporary_path
from kvferry.units import format_bytes

# The default capacity of a directory is the free space divided by this.
DEFAULT_CAPACITY_DIVISOR = 10

# Time to wait for the ledger's lock. Another process holds it while it counts the files of a large directory.
_PATIENCE_SECONDS = 60.0

# Two folders, the marker and the note need an inode each.
_MOST_EVICTED = 4

_SIGNATURE = "file tier"

_log = logging.getLogger(__name__)


def check_directory(root: str) -> None:
    """Check that a directory exists, and that this release can use it.

    A directory that kvferry has used contains a marker (file with the version of the directory's layout).

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
    """Check that a directory exists, that this release can use it, and that files can be written there.

    Raises:
        ConfigError: `check_directory` refuses the directory, or a file cannot be listed, created, locked or
            written there.
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


def read_marker(root: str) -> object | None:
    """Return the version of a directory's layout, as its marker file says; None if there is no marker file.

    Raises:
        ConfigError: the marker cannot be read or is invalid.
    """
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


def open_directory(
    root: str, ledger: Ledger, space: DirectorySpace, namespace: Namespace, capacity: int | None
) -> None:
    """Prepare a directory for use by a file tier.

    The function removes temporary files of dead writers, counts the files, sets the capacity, evicts files
    beyond the capacity, and writes the marker (version of the layout) and the note (description of the
    namespace). It logs a warning if other users can write to the directory.

    Args:
        root: path of the directory, which `check_directory` has checked.
        ledger: ledger (capacity and bytes in use) of the directory. The function sets its capacity, and the
            callbacks for a lost ledger file (`after_loss`) and a replaced directory (`after_swap`).
        space: object that evicts files of the directory to make room.
        namespace: namespace that the caller will use.
        capacity: maximum bytes of all kvferry files of all processes. If None, the current capacity is kept,
            and a new directory gets a tenth of the free space.

    Raises:
        ConfigError: the directory cannot be read or written, or other processes held the lock of its ledger
            for too long. It is also raised if the capacity is too small for the marker and the note, or
            larger than the sum of the disk's free bytes and the bytes in use.
    """
    try:
        if who := writable_by_others(root):
            _log.warning(
                "file tier %s: %s; a chunk that they write is used like the engine's own: let only this user "
                "write there (chmod 700), or see that only engines run as them",
                root,
                who,
            )
        with ledger.held(_PATIENCE_SECONDS) as held_ledger:
            space.settle(held_ledger)
            held_ledger.limit(_capacity(root, held_ledger, capacity))
            ledger.capacity = held_ledger.capacity
            space.make_room(held_ledger)
            _make_way_and_create(root, namespace, held_ledger, space)
        ledger.after_swap = lambda: _check_again(root)
        # If an operator clears the directory, engines that still use it write its folders and notes again.
        ledger.after_loss = lambda held_ledger: _recreate_missing_files(root, namespace, held_ledger, space)
    except LockTimeout as error:
        raise ConfigError(f"file tier: {error}; find the process that holds it, and end it") from error
    except OSError as error:
        raise unusable_directory(root, error) from error


def unusable_directory(root: str, error: OSError) -> ConfigError:
    """Return a ConfigError with advice for the operator, for an OSError of an operation on a directory."""
    said, advice = error.strerror or str(error), "see to its owner, mode and mount"
    if error.errno in OUT_OF_ROOM:
        lacking, advice = shortage(root, error)
        said += f": {lacking}"
    return ConfigError(f"file tier: cannot use {root}: {said} ({error.filename or root}); {advice}")


def _capacity(root: str, held_ledger: HeldLedger, requested: int | None) -> int:
    """Return the capacity to use for a directory, in bytes.

    Args:
        root: path of the directory.
        held_ledger: ledger (capacity and bytes in use) of the directory.
        requested: capacity to set, in bytes. If None, the current capacity is kept, and a new directory gets
            a tenth of the sum of the disk's free bytes and the bytes in use.

    Raises:
        ConfigError: the requested capacity is larger than the sum of the disk's free bytes and the bytes in
            use.
    """
    free = DiskRoom.of(root).free
    if requested is None:
        return held_ledger.capacity or (free + held_ledger.used) // DEFAULT_CAPACITY_DIVISOR
    if requested > free + held_ledger.used:
        raise ConfigError(
            f"file tier: {format_bytes(free)} free and {format_bytes(held_ledger.used)} of cache under "
            f"{root}, capacity asks "
            f"for {format_bytes(requested)}; lower the capacity or free space"
        )
    return requested


def _make_way_and_create(
    root: str, namespace: Namespace, held_ledger: HeldLedger, space: DirectorySpace
) -> None:
    """Call `_create_missing_files`, and evict files for it if the file system has no room.

    Raises:
        ConfigError: a file does not fit into the capacity.
        OSError: a folder or a file cannot be created, also after a few files were evicted.
    """
    for _ in range(_MOST_EVICTED):
        try:
            return _create_missing_files(root, namespace, held_ledger, space)
        except OSError as error:
            if error.errno not in OUT_OF_ROOM or not space.evict_listed(held_ledger, size=1):
                raise
    return _create_missing_files(root, namespace, held_ledger, space)


def _create_missing_files(
    root: str, namespace: Namespace, held_ledger: HeldLedger, space: DirectorySpace
) -> None:
    """Create the missing folders, marker and note of a directory. The caller holds the lock of the ledger.

    The marker is a file with the version of the layout. The note is a file that describes a namespace.

    Args:
        root: path of the directory.
        namespace: namespace (scope of chunk keys) whose folder and note are created.
        held_ledger: ledger (capacity and bytes in use) of the directory.
        space: object that evicts files of the directory to make room for the marker and the note.
    """
    folder = f"{root}/{namespace.digest.hex()}"
    make_folder(root, f"{root}/{QUARANTINE}")
    make_folder(root, folder)
    marker = json.dumps({"kvferry": _SIGNATURE, "directory": DIRECTORY_VERSION}, indent=1, sort_keys=True)
    _write_note(f"{root}/{MARKER}", marker + "\n", held_ledger, space)
    _write_note(f"{folder}/{NAMESPACE_NOTE}", namespace.note, held_ledger, space)


def _check_again(root: str) -> None:
    """Check that a new directory at the path of a file tier has a layout that this release can use.

    This is called when another directory has replaced the one that the tier used before.

    Args:
        root: path of the directory.

    Raises:
        OSError: the directory is missing, its layout has another version, or its marker is unreadable or
            invalid.
    """
    try:
        check_directory(root)
    except ConfigError as error:
        raise OSError(errno.ESTALE, str(error)) from error


def _recreate_missing_files(
    root: str, namespace: Namespace, held_ledger: HeldLedger, space: DirectorySpace
) -> None:
    """Recreate missing folders and small files, for example after an operator has cleared the directory.

    The small files are the marker (version of the directory's layout) and the note (text that describes the
    namespace). Errors are ignored, because chunks can be stored without these files. The caller holds the
    lock of the ledger.

    Args:
        root: path of the directory.
        namespace: namespace (scope of chunk keys) whose folder and note are created.
        held_ledger: ledger (capacity and bytes in use) of the directory.
        space: object that evicts files of the directory to make room for the marker and the note.
    """
    # Notes are only for people. If one cannot be written, chunks are still stored.
    with suppress(ConfigError, OSError):
        _create_missing_files(root, namespace, held_ledger, space)


def _write_note(path: str, text: str, held_ledger: HeldLedger, space: DirectorySpace) -> None:
    """Write a marker or a note (a small file) if it does not exist, and count its bytes as used.

    The caller holds the ledger's lock.

    Args:
        path: path of the file.
        text: content of the file, in ASCII.
        held_ledger: ledger (capacity and bytes in use) of the directory.
        space: object that evicts other files of the directory to make room.

    Raises:
        ConfigError: the file does not fit into the capacity.
        OSError: the file cannot be written.
    """
    if is_regular(path):
        return
    data = text.encode("ascii")
    if not space.make_room(held_ledger, len(data)):
        needed = format_bytes(held_ledger.used + len(data))
        raise ConfigError(
            f"file tier: a capacity of {format_bytes(held_ledger.capacity)} cannot hold the {needed} that "
            "are needed "
            "before the first chunk; raise the capacity"
        )
    temporary = temporary_path(path, len(data))
    held_ledger.charge(len(data))
    fd = -1
    try:
        fd = open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        write_all(fd, [data])
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        held_ledger.release(len(data))
        raise
    finally:
        if fd >= 0:
            os.close(fd)
