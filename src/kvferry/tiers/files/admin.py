"""Operator commands on a directory of the file tier. Engines may use it at the same time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from kvferry.common.errors import ConfigError
from kvferry.common.machine import require_posix
from kvferry.tiers.admin import CacheAdmin, CollectResult, SpaceUsage, StoredFile
from kvferry.tiers.files import chunk_file
from kvferry.tiers.files.chunk_file import open_regular
from kvferry.tiers.files.full_disk import DiskRoom
from kvferry.tiers.files.ledger import HeldLedger, Ledger, LockTimeout, read_ledger, read_write_budget
from kvferry.tiers.files.opening import PATIENCE_SECONDS, check_directory, read_marker, unusable_directory
from kvferry.tiers.files.space import DirectorySpace, quarantine_file
from kvferry.tiers.format.chunk import Buffer
from kvferry.tiers.names import OutcomeCounter
from kvferry.tiers.paths import MARKER, CacheEntry, EntryKind, folders, walk


class DirectoryAdmin(CacheAdmin):
    """A cache directory, as operator commands use it. Raise ConfigError if the path is no such directory."""

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
        with _as_config_error(self.where):
            yield from walk(self.where)

    @contextmanager
    def opened(self, entry: CacheEntry) -> Iterator[StoredFile]:
        fd = open_regular(entry.path, os.O_RDONLY)
        try:
            yield _OpenFile(self.where, entry.path, fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def space(self) -> SpaceUsage:
        capacity, charged = read_ledger(self.where) or (None, None)
        with _as_config_error(self.where):
            room = DiskRoom.of(self.where)
        found = SpaceUsage(capacity, charged, room.free, room.free_files)
        if (budget := read_write_budget(self.where)) is None:
            return found
        return replace(found, write_per_day=budget.bytes_per_day, write_budget_left=budget.left(time.time()))

    def collect(self, capacity: int | None = None) -> CollectResult:
        # The tier's own code evicts, so that a command and engines agree about order and bytes.
        counter = OutcomeCounter()
        ledger = Ledger(self.where, PATIENCE_SECONDS)
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
        removed, removed_bytes = 0, 0
        marker = f"{self.where}/{MARKER}"
        with _held(self.where, Ledger(self.where, PATIENCE_SECONDS)) as held_ledger:
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
                held_ledger.release(entry.charged, entry.path)
                removed, removed_bytes = removed + 1, removed_bytes + size
            for folder in list(folders(self.where)):
                # A folder with other files cannot be removed, and stays.
                with suppress(OSError):
                    os.rmdir(folder)
        return removed, removed_bytes


@dataclass(frozen=True, slots=True)
class _OpenFile(StoredFile):
    root: str
    path: str
    fd: int
    size: int

    def read(self, offset: int, size: int) -> Buffer:
        return chunk_file.read(self.fd, offset, size)

    def quarantine(self) -> bool:
        # `fstat` of the descriptor: the file that failed the check, whatever its path names by now.
        return quarantine_file(self.root, Ledger(self.root), os.fstat(self.fd), self.path)


@contextmanager
def _held(root: str, ledger: Ledger) -> Iterator[HeldLedger]:
    """Lock a ledger; convert every OSError, also of the body, and a lock timeout to ConfigError."""
    try:
        with _as_config_error(root), ledger.held() as held_ledger:
            yield held_ledger
    except LockTimeout as error:
        raise ConfigError(f"{error}; find the process that holds it, and end it") from error


@contextmanager
def _as_config_error(root: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unusable_directory(root, error) from error
