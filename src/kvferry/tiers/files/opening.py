"""Open a directory of the file tier: set its capacity, remove leftovers, and write its notes.

The *marker* is a file with the version of the directory's layout. A *note* is a file that describes a
namespace to people.
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
from kvferry.tiers.files.directory_checks import (
    SIGNATURE,
    check_directory,
    unusable_directory,
    writable_by_others,
)
from kvferry.tiers.files.full_disk import OUT_OF_ROOM, DiskRoom
from kvferry.tiers.files.ledger import HeldLedger, Ledger
from kvferry.tiers.files.lock_handoff import LockTimeout
from kvferry.tiers.files.regular_file import is_regular, make_folder
from kvferry.tiers.files.space import DirectorySpace
from kvferry.tiers.paths import DIRECTORY_VERSION, MARKER, NAMESPACE_NOTE, QUARANTINE
from kvferry.units import format_bytes

# The default capacity of a directory is the free space divided by this.
DEFAULT_CAPACITY_DIVISOR = 10

# Time to wait for the ledger's lock. Another process holds it while it counts the files of a large directory.
PATIENCE_SECONDS = 60.0

# Two folders, the marker and the note need an inode each.
_MOST_EVICTED = 4

_log = logging.getLogger(__name__)


def open_directory(
    root: str, ledger: Ledger, space: DirectorySpace, namespace: Namespace, capacity: int | None
) -> None:
    """Prepare a directory for a file tier: sweep, count, evict down to the capacity, write the notes.

    Args:
        root: path of the directory, which `check_directory` has checked.
        ledger: gets its capacity, `after_loss` and `after_swap` here.
        capacity: maximum bytes of all kvferry files of all processes. None keeps the current capacity. A new
            directory then gets a tenth of the free space.

    Raises:
        ConfigError: the directory cannot be read or written, other processes held the lock for too long, or
            the capacity is too small for marker and note, or larger than the free bytes plus those in use.
    """

    def recreate(held_ledger: HeldLedger) -> None:
        # Notes are only for people. If one cannot be written, chunks are still stored.
        with suppress(ConfigError, OSError):
            _create_missing_files(namespace, held_ledger, space)

    try:
        if who := writable_by_others(root):
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
            ledger.capacity = held_ledger.capacity
            space.make_room(held_ledger)
            _make_way_and_create(namespace, held_ledger, space)
        ledger.after_swap = lambda: _check_again(root)
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


def _make_way_and_create(namespace: Namespace, held_ledger: HeldLedger, space: DirectorySpace) -> None:
    """Create missing files. If the file system is full, evict a few files for them."""
    for left in reversed(range(_MOST_EVICTED + 1)):
        try:
            _create_missing_files(namespace, held_ledger, space)
        except OSError as error:
            full = left and error.errno in OUT_OF_ROOM
            if not (full and space.evict_listed(held_ledger, size=1)):
                raise
        else:
            return


def _create_missing_files(namespace: Namespace, held_ledger: HeldLedger, space: DirectorySpace) -> None:
    root, folder = space.root, f"{space.root}/{namespace.digest.hex()}"
    make_folder(root, f"{root}/{QUARANTINE}")
    make_folder(root, folder)
    marker = json.dumps({"kvferry": SIGNATURE, "directory": DIRECTORY_VERSION}, indent=1, sort_keys=True)
    _write_note(f"{root}/{MARKER}", marker + "\n", held_ledger, space)
    _write_note(f"{folder}/{NAMESPACE_NOTE}", namespace.note, held_ledger, space)


def _check_again(root: str) -> None:
    try:
        check_directory(root)
    except ConfigError as error:
        raise OSError(errno.ESTALE, str(error)) from error


def _write_note(path: str, text: str, held_ledger: HeldLedger, space: DirectorySpace) -> None:
    """Write a small file if it does not exist, and charge its bytes.

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
        held_ledger.release(len(data))
        raise
    finally:
        os.close(fd)
