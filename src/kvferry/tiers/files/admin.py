"""Operator commands on a directory of the file tier. Engines may use it at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.operating_system import require_posix
from kvferry.tiers.admin import CacheAdmin, CollectResult, SpaceUsage, StoredFile
from kvferry.tiers.files import chunk_file
from kvferry.tiers.files.full_disk import DiskRoom
from kvferry.tiers.files.ledger import HeldLedger, Ledger, read_ledger
from kvferry.tiers.files.lock_handoff import LockTimeout
from kvferry.tiers.files.opening import check_directory, read_marker, unusable_directory
from kvferry.tiers.files.quarantine import quarantine_file
from kvferry.tiers.files.regular_file import open_regular
from kvferry.tiers.files.space import DirectorySpace
from kvferry.tiers.format.checksum import Buffer
from kvferry.tiers.outcome import OutcomeCounter
from kvferry.tiers.paths import MARKER, CacheEntry, EntryKind, folders, walk

# Time to wait for the ledger's lock. An engine holds it while it counts the files of a large directory.
_PATIENCE_SECONDS = 60.0


class DirectoryAdmin(CacheAdmin):
    """A cache directory of the file tier, as operator commands use it.

    Args:
        path: path of the directory.

    Raises:
        ConfigError: the path is not a directory of the file tier, or this system has no such directories.
    """

    records_use = True
    no_capacity = "unknown: the ledger is damaged"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require_posix("a cache directory")
        self.where = os.path.abspath(path)
        check_directory(self.where)
        if read_marker(self.where) is None:
            raise ConfigError(
                f"{self.where} is not a cache of kvferry: it has no {MARKER}; name the directory that has it"
            )

    def entries(self) -> Iterator[CacheEntry]:
        """Yield an entry for each kvferry file in the directory.

        Raises:
            ConfigError: the files cannot be listed.
        """
        with _as_config_error(self.where):
            yield from walk(self.where)

    @contextmanager
    def opened(self, entry: CacheEntry) -> Iterator[StoredFile]:
        """Return a context manager that opens the file of an entry for reading.

        Entering the context raises FileNotFoundError if the file is gone, and another OSError if it cannot be
        opened.
        """
        fd = open_regular(entry.path, os.O_RDONLY)
        try:
            yield _OpenFile(self.where, entry.path, fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def space(self) -> SpaceUsage:
        """Return the capacity, the bytes in use, and the free room of the disk.

        Raises:
            ConfigError: the free room cannot be read.
        """
        capacity, charged = read_ledger(self.where) or (None, None)
        with _as_config_error(self.where):
            room = DiskRoom.of(self.where)
        return SpaceUsage(capacity, charged, room.free, room.free_files)

    def collect(self, capacity: int | None = None) -> CollectResult:
        """Evict files of the directory until at most `capacity` bytes are in use.

        Before that, remove the temporary files that dead writers left behind, and count the bytes in use
        again. The least recently used files are evicted first.

        Args:
            capacity: maximum bytes in use after this call. It does not change the capacity of the directory.
                None for the capacity of the directory.

        Raises:
            ConfigError: the directory cannot be read or changed, other processes held the lock of its ledger
                for too long, or `capacity` is None and the capacity of the directory is unknown.
        """
        counter = OutcomeCounter()
        ledger = Ledger(self.where, _PATIENCE_SECONDS)
        space = DirectorySpace(self.where, ledger, counter, lambda _: None)
        with _held(self.where, ledger) as held_ledger:
            goal = held_ledger.capacity if capacity is None else capacity
            if not goal and capacity is None:
                raise ConfigError(
                    f"the ledger of {self.where} was lost, and with it the capacity; give one with --capacity"
                )
            space.settle(held_ledger)
            space.make_room(held_ledger, held_ledger.capacity - goal)
            done = counter.stats()
            return CollectResult(done.swept, done.evicted, done.evicted_bytes, held_ledger.used, goal)

    def clear(self) -> tuple[int, int]:
        """Remove all kvferry files of the directory. Return their number and the sum of their bytes.

        Other files are not removed, and neither are folders that contain other files.

        Raises:
            ConfigError: the directory cannot be read or changed, or other processes held the lock of its
                ledger for too long.
        """
        removed, removed_bytes = 0, 0
        marker = f"{self.where}/{MARKER}"
        with _held(self.where, Ledger(self.where, _PATIENCE_SECONDS)) as held_ledger:
            # Remove the ledger and the marker last. If the command is interrupted, it can be repeated.
            last = {EntryKind.LEDGER: 2, EntryKind.NOTE: 1}
            for entry in sorted(
                walk(self.where), key=lambda one: (last.get(one.kind, 0), one.path == marker)
            ):
                try:
                    size = os.lstat(entry.path).st_size
                    os.unlink(entry.path)
                except FileNotFoundError:
                    continue
                # Release after each file: if removing fails later, engines need the right number to evict by.
                held_ledger.release(entry.charged)
                removed, removed_bytes = removed + 1, removed_bytes + size
            for folder in list(folders(self.where)):
                # A folder with other files cannot be removed, and stays.
                with suppress(OSError):
                    os.rmdir(folder)
        return removed, removed_bytes


@dataclass(frozen=True, slots=True)
class _OpenFile(StoredFile):
    """A file of a cache directory that is open for reading.

    Attributes:
        root: path of the cache directory.
        path: path of the file.
        fd: descriptor of the open file.
        size: length of the file in bytes.
    """

    root: str
    path: str
    fd: int
    size: int

    def read(self, offset: int, size: int) -> Buffer:
        return chunk_file.read(self.fd, offset, size)

    def quarantine(self) -> bool:
        return quarantine_file(self.root, Ledger(self.root), os.fstat(self.fd), self.path)


@contextmanager
def _held(root: str, ledger: Ledger) -> Iterator[HeldLedger]:
    """Return a context manager that locks the ledger of a directory and gives access to its content.

    Args:
        root: path of the directory, for messages.
        ledger: ledger of the directory: a file with its capacity and its bytes in use, and a lock.

    Raises:
        ConfigError: other processes held the lock for too long, the ledger cannot be opened or written, or
            the body of the ``with`` block raises an OSError.
    """
    try:
        with _as_config_error(root), ledger.held() as held_ledger:
            yield held_ledger
    except LockTimeout as error:
        raise ConfigError(f"{error}; find the process that holds it, and end it") from error


@contextmanager
def _as_config_error(root: str) -> Iterator[None]:
    """Return a context manager that converts an OSError in its body to a ConfigError.

    The message has advice for the operator. `root` is the path of the directory, for the message.
    """
    try:
        yield
    except OSError as error:
        raise unusable_directory(root, error) from error
