"""Space for new files in a directory. A writer reserves it, writes the file, then commits or abandons it.

To make room, the least recently used files are evicted: chunks of any namespace, and quarantined files. A
walk of the directory lists them in order of use, usually without the ledger's lock. Each file is checked
again before it is evicted, because other processes use, evict and write files too.

If tenants share the directory by weight (`kvferry.tiers.tenants`), a walk lists the files of each tenant, and
the ledger tells which tenant gives way: it has the bytes of each, by all processes.

The capacity counts bytes. If a file system has few inodes, a twentieth of them stays free for other programs.
The file system may also run out of something else: a quota, entries in a folder, or bytes and inodes, because
other programs use them. It then refuses a new file, and the least recently used files are evicted for the new
one.
"""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Set as AbstractSet
from contextlib import suppress
from itertools import chain
from operator import itemgetter
from threading import Lock
from typing import NamedTuple

import numpy as np

from kvferry.common.machine import fcntl
from kvferry.common.units import format_bytes
from kvferry.keys.tenant import NOBODY
from kvferry.tiers.files.chunk_file import (
    NotRegular,
    check_folders,
    is_regular,
    make_folder,
    open_regular,
    set_cold,
)
from kvferry.tiers.files.full_disk import OUT_OF_ROOM, DiskRoom, shortage
from kvferry.tiers.files.ledger import HeldLedger, Ledger, LockTimeout
from kvferry.tiers.names import OutcomeCounter
from kvferry.tiers.paths import (
    CacheEntry,
    EntryKind,
    boot_id,
    chunk_identity,
    folders,
    quarantine_name,
    temporary_path,
    tenant_of_path,
    walk,
)
from kvferry.tiers.tenants import Tenants
from kvferry.tiers.write_budget import WriteBudget

# Minimum age of another machine's temporary file before it is removed. A shared mount may hide its lock.
_FOREIGN_LEFTOVER_SECONDS = 900.0

# A file whose time is further in the future than this got it from a wrong clock.
_AHEAD_SECONDS = 300.0

# A million names would take a lot of memory, and most of these files would be used or removed before they are
# evicted. To evict more, the directory is walked again.
MAX_LISTED = 1 << 15

_EVICTABLE = (EntryKind.CHUNK, EntryKind.QUARANTINED)
_LATEST = 1 << 62

# Something else may hold what is used up on a full file system: other programs, other users' files under a
# quota, a thin volume. Evicting for each store would then empty the directory for nothing.
_PAUSE_SECONDS = 60.0

_log = logging.getLogger(__name__)


class DirectoryFull(Exception):
    """Raised if a directory has no room for a file, even after eviction; if `too_large`, for it alone."""

    def __init__(self, size: int, held_ledger: HeldLedger) -> None:
        super().__init__(f"{size} bytes do not fit; {held_ledger.used} of {held_ledger.capacity} are in use")
        self.too_large = size > held_ledger.capacity


class OverBudget(Exception):
    """Raised if nothing more may be written to the directory for a while."""

    def __init__(self, budget: WriteBudget) -> None:
        super().__init__(f"{format_bytes(budget.bytes_per_day)} may be written per day")


class _WalkResult(NamedTuple):
    """All kvferry files of a directory, as one walk found them."""

    temporary: list[CacheEntry]  # temporary files of writers, alive or dead
    # Ranks and paths of the files to evict, the first first, by tenant.
    listed: dict[bytes, list[tuple[int, str]]]
    more: bool
    charged: int  # sum of `CacheEntry.charged` over all files


class DirectorySpace:
    """Reserves space for new files in one directory, and evicts old files for them. Any thread may use it.

    `on_evicted` is called with the path of every evicted file. A walk lists `max_listed` files for eviction.
    Methods raise LockTimeout if other threads or processes held the lock of the ledger for too long.
    """

    def __init__(
        self,
        root: str,
        ledger: Ledger,
        counter: OutcomeCounter,
        on_evicted: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        max_listed: int = MAX_LISTED,
    ) -> None:
        self.root = root
        self._max_listed = max_listed
        self._ledger = ledger
        self._counter = counter
        self._on_evicted = on_evicted
        self._clock = clock
        self._tenants: Tenants | None = None
        # Ranks and paths of evictable files from the last walk, by tenant; changed only while the ledger is
        # held. Files that were used or stored after the walk, and files that it did not list, are newer. Cold
        # ones that were stored after it are added.
        self._oldest: dict[bytes, deque[tuple[int, str]]] = {}
        # Tenants without files in the last walk, until the next call: they may store some.
        self._empty: AbstractSet[bytes] = frozenset()
        self._more = False
        self._walking = Lock()
        self._paused_at: float | None = None
        self._logged = Lock()  # taken by the thread that logs the first eviction on a full disk, for good

    def use_tenants(self, tenants: Tenants) -> None:
        """Share the directory among tenants by weight from now on. Call this before the first `reserve`."""
        self._tenants, self._oldest, self._more = tenants, {}, True

    def reserve(self, final: str, size: int) -> tuple[int, str]:
        """Make room for a file of `size` bytes, charge them, and create it empty under a temporary name.

        Return the descriptor of this file, open for writing and locked with flock, and its path. Raise
        OverBudget, and evict nothing, if the write budget is used up.
        """
        with self._ledger.held() as held_ledger:
            self._empty = frozenset()
            if size > held_ledger.capacity:
                raise DirectoryFull(size, held_ledger)
            self._check_budget(held_ledger)
            if self._evict_for(held_ledger, final, size):
                return self._create_chunk(held_ledger, final, size)
        # One thread walks. The others wait, and then find that there is room, or files to evict.
        with self._walking:
            with self._ledger.held() as held_ledger:
                if self._evict_for(held_ledger, final, size):
                    return self._create_chunk(held_ledger, final, size)
                most = self._to_list(held_ledger, final)
            found = self._walk(most)
            with self._ledger.held() as held_ledger:
                self._apply_walk(found, held_ledger)
                if self.make_room(held_ledger, size, final):
                    return self._create_chunk(held_ledger, final, size)
                # Count again before giving up: killed writers may have charged bytes without creating a file.
                self.settle(held_ledger, final)
                if self.make_room(held_ledger, size, final):
                    return self._create_chunk(held_ledger, final, size)
                raise DirectoryFull(size, held_ledger)

    def commit(self, temporary: str, final: str, size: int, cold: int | None = None) -> bool:
        """Rename a complete file, or remove it if `final` exists. Return whether it was renamed.

        With `cold`, its descriptor, it is evicted before all files with a time of use. After LockTimeout or
        OSError the file still exists.
        """
        with self._ledger.held() as held_ledger:
            if not is_regular(final):
                os.rename(temporary, final)
                # Not before: an old temporary file looks like a leftover to other machines.
                if cold is not None:
                    self._list_cold(final, self._rank(set_cold(cold, self._clock), size))
                return True
            os.unlink(temporary)
            held_ledger.release(size, temporary)
            return False

    def remove(self, found: os.stat_result, path: str) -> bool:
        """Remove a file, unless it was used or replaced since it was `found`. Return whether it is gone."""
        with self._ledger.held() as held_ledger:
            check_folders(self.root, path)
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                return True
            # A new file may have the inode of an old one.
            if not os.path.samestat(found, status) or found.st_ctime_ns != status.st_ctime_ns:
                return False
            os.unlink(path)
            held_ledger.release(found.st_size, path)
            self._counter.add(evicted=1, evicted_bytes=found.st_size)
            return True

    def abandon(self, temporary: str, size: int) -> None:
        """Remove a file that could not be written or committed, and release its `size` reserved bytes.

        If it cannot be removed, its bytes count until a later sweep.
        """
        # Truncated first, so that its bytes are free even if the lock or the removal fails.
        with suppress(OSError):
            os.close(open_regular(temporary, os.O_WRONLY | os.O_TRUNC))
        # Hold the ledger before removing the file. If it were counted in between, `release` would be wrong.
        # A sweep skips a file that its writer still has open, so it cannot be removed twice.
        with suppress(LockTimeout, OSError), self._ledger.held() as held_ledger:
            os.unlink(temporary)
            held_ledger.release(size, temporary)

    def settle(self, held_ledger: HeldLedger, final: str = "") -> None:
        """Remove temporary files of dead writers, and count the bytes in use again.

        This walks the whole directory two or three times while the ledger is locked, so it can take long.
        """
        self._apply_walk(self._walk(self._to_list(held_ledger, final)), held_ledger)
        held_ledger.count()

    def make_room(self, held_ledger: HeldLedger, size: int = 0, final: str = "") -> bool:
        """Evict files until another `size` bytes, maybe negative, fit into the capacity. Return if so.

        `final` is the path of the file with these bytes, if it is a chunk.
        """
        before, fits = -1, size <= held_ledger.capacity
        while fits and not self._evict_for(held_ledger, final, size):
            if not self._more or held_ledger.used == before:
                return False
            before = held_ledger.used
            self._apply_walk(self._walk(self._to_list(held_ledger, final)), held_ledger)
        return fits

    def make_way(self, error: OSError, tries: int, final: str, size: int) -> bool:
        """Evict files after `tries` refusals of a file by the file system. Return whether to try again."""
        paused = self._paused_at is not None and abs(self._clock() - self._paused_at) < _PAUSE_SECONDS
        if error.errno not in OUT_OF_ROOM or paused:
            return False
        # Before the eviction, which makes room.
        said = () if self._logged.locked() else shortage(self.root, error, size)
        # One file is enough if inodes or a quota of files ran out, and also for bytes if files are of one
        # size. A folder with as many files as it may have needs one of its own to go.
        for at_least, folder in ((1, ""), (1, os.path.dirname(final)), (size, ""))[tries - 1 :]:
            if self.evict(at_least, folder, final):
                if said and self._logged.acquire(blocking=False):
                    _log.warning(
                        "file tier %s: its file system is full before the capacity is used up: %s. The least "
                        "recently used chunks are evicted for new ones; %s",
                        self.root,
                        *said,
                    )
                return True
        self._paused_at = self._clock()
        return False

    def spare_files(self) -> None:
        """Evict files if few inodes of the file system are free. Call this before a chunk is stored.

        Raise OverBudget, and evict nothing, if the write budget is used up.
        """
        room = DiskRoom.of(self.root)
        if not room.lacks_files:
            return
        with self._ledger.held() as held_ledger:
            self._check_budget(held_ledger)
        # A new file and its folder take two, and the number of free inodes is to grow.
        evicted = [self.evict(1) for _ in range(3)]
        if any(evicted) and self._logged.acquire(blocking=False):
            _log.warning(
                "file tier %s: its file system runs out of inodes before the capacity is used up: %s of %s "
                "are free. The least recently used chunks are evicted for new ones; use a file system with "
                "more inodes, or raise chunk_tokens",
                *(self.root, f"{room.free_files:,}", f"{room.files:,}"),
            )

    def evict(self, size: int, folder: str = "", final: str = "") -> bool:
        """Evict `size` bytes, or all that there are, although the capacity has room; return if any was.

        With `folder`, evict only the first of this folder's listed files. `final` is the path of the file
        that needs the room.
        """
        with self._walking:
            with self._ledger.held() as held_ledger:
                self._empty = frozenset()
                evicted = self.evict_listed(held_ledger, size, folder, final)
                # Of files in one folder, there may be none among those that are listed.
                if evicted or (folder and any(self._oldest.values())):
                    return evicted
                most = self._to_list(held_ledger, final)
            found = self._walk(most)
            with self._ledger.held() as held_ledger:
                self._apply_walk(found, held_ledger)
                # Folders of models that nobody serves any more keep inodes after their last chunk is evicted.
                for empty in list(folders(self.root)):
                    with suppress(OSError):
                        os.rmdir(empty)
                return self.evict_listed(held_ledger, size, folder, final)

    def evict_listed(self, held_ledger: HeldLedger, size: int, folder: str = "", final: str = "") -> bool:
        """Do what `evict` does, but evict only files that the last walk has listed."""
        before = held_ledger.used
        if not folder:
            self._evict_to(held_ledger, max(0, before - size), final)
        else:
            order = self._order(held_ledger, final)
            files = chain.from_iterable(self._oldest.get(tenant, ()) for tenant in order)
            listed = (one for one in files if os.path.dirname(one[1]) == folder)
            while held_ledger.used == before and (one := next(listed, None)) is not None:
                self._evict(held_ledger, *one)
        return held_ledger.used < before

    def create(self, held_ledger: HeldLedger, final: str, size: int) -> tuple[int, str]:
        """Do what `reserve` does with a held ledger, without making room."""
        check_folders(self.root, final)
        path, fd = temporary_path(final, size), -1
        held_ledger.charge(size, final)
        try:
            fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            # This lock is free: only a sweep tries to lock temporary files, and it needs the ledger.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if fd >= 0:
                os.close(fd)
                os.unlink(path)
            held_ledger.release(size, final)
            raise
        return fd, path

    def _list_cold(self, path: str, rank: int) -> None:
        """Add a new cold file to the listed ones, unless others that are not listed may go before it."""
        tenant = NOBODY if self._tenants is None else tenant_of_path(path)
        if tenant is None:
            return
        files = self._oldest.get(tenant, deque())
        at = bisect_right(files, rank, key=itemgetter(0))
        if at < len(files) or not self._more:
            files.insert(at, (rank, path))
            self._oldest[tenant] = files
            if len(files) > self._max_listed:
                files.pop()
                self._more = True

    def _check_budget(self, held_ledger: HeldLedger) -> None:
        if held_ledger.budget is not None and not held_ledger.budget.left(self._clock()):
            raise OverBudget(held_ledger.budget)

    def _create_chunk(self, held_ledger: HeldLedger, final: str, size: int) -> tuple[int, str]:
        created = self.create(held_ledger, final, size)
        held_ledger.charge_write(size, self._clock())
        return created

    def _evict_for(self, held_ledger: HeldLedger, final: str, size: int) -> bool:
        """Evict listed files until there is room for `size` bytes of a file. Return whether there is."""
        return self._evict_to(held_ledger, held_ledger.capacity - held_ledger.cost(size, final), final, size)

    def _evict_to(self, held_ledger: HeldLedger, goal: int, final: str = "", size: int = 0) -> bool:
        """Evict listed files until at most `goal` bytes are in use; return whether they are.

        Then `size` bytes of a chunk with the path `final`, if it has one, are also within its tenant's limit.
        """
        while held_ledger.used > goal or self._is_over_limit(held_ledger, final, size):
            first = next(iter(self._order(held_ledger, final, size)), None)
            if first is None or not (listed := self._oldest.get(first)):
                return False  # it may have files that were not listed
            self._evict(held_ledger, *listed.popleft())
        return True

    def _is_over_limit(self, held_ledger: HeldLedger, final: str, size: int) -> bool:
        if self._tenants is None or (tenant := tenant_of_path(final)) is None:
            return False
        used = held_ledger.tenants.used().get(tenant, 0)
        return self._tenants.is_over_limit(tenant, used + size, held_ledger.capacity)

    def _order(self, held_ledger: HeldLedger, final: str, size: int = 0) -> list[bytes]:
        """Return the tenants whose files are evicted for a file, in this order, but those without any."""
        if self._tenants is None:
            return [NOBODY]
        used, storing = held_ledger.tenants.used(), tenant_of_path(final)
        if storing is not None:
            used[storing] = used.get(storing, 0) + size
        order = self._tenants.give_way(used, storing, held_ledger.capacity)
        return [tenant for tenant in order if tenant not in self._empty]

    def _to_list(self, held_ledger: HeldLedger, final: str = "") -> dict[bytes, int]:
        """Return how many files a walk lists of each tenant that may give way before the next walk."""
        if self._tenants is None:
            return {NOBODY: self._max_listed}
        used, storing = held_ledger.tenants.used(), tenant_of_path(final)
        # Walks take long, so also tenants that may soon use more than their fair share.
        found = self._tenants.near_mean(used)
        if storing is not None:
            found.add(storing)
        total = sum(used.get(tenant, 0) for tenant in found) or 1
        return {tenant: 1 + self._max_listed * used.get(tenant, 0) // total for tenant in found}

    def _evict(self, held_ledger: HeldLedger, rank: int, path: str) -> None:
        """Evict a listed file, unless it was used after the walk, is gone, or cannot be removed."""
        try:
            check_folders(self.root, path)
            status = os.lstat(path)
            if self._rank(status.st_mtime_ns, status.st_size) > rank:
                # The file was used after the walk, so it is newer than the unlisted files.
                return
            os.unlink(path)
        except OSError:
            # Another process has evicted the file, or this user may not remove it.
            return
        held_ledger.release(status.st_size, path)
        self._counter.add(evicted=1, evicted_bytes=status.st_size)
        self._on_evicted(path)

    def _walk(self, most: Mapping[bytes, int]) -> _WalkResult:
        """Walk the directory, and list so many files of these tenants."""
        temporary: list[CacheEntry] = []
        charged, others = 0, False
        oldest = {tenant: LeastRecentlyUsed(count) for tenant, count in most.items()}
        for entry in walk(self.root):
            charged += entry.charged
            if entry.kind in _EVICTABLE:
                tenant = NOBODY if self._tenants is None else tenant_of_path(entry.path)
                if tenant is not None and tenant in oldest:
                    oldest[tenant].add(self._rank(entry.used_ns, entry.size), entry.path)
                else:
                    others = True
            elif entry.kind is EntryKind.TEMPORARY:
                temporary.append(entry)
        listed = {tenant: files.listed() for tenant, files in oldest.items()}
        return _WalkResult(temporary, listed, others or any(one.more for one in oldest.values()), charged)

    def _rank(self, used_ns: int, size: int) -> int:
        """Return the rank of a file for eviction, the lowest first: its time of last use in nanoseconds."""
        # A time in the future comes from a wrong clock, and would protect the file for a long time. A file
        # larger than the capacity would leave room for no other. Both go first.
        ahead = used_ns / 1e9 - self._clock() > _AHEAD_SECONDS
        strange = ahead or size > (self._ledger.capacity or size)
        return min(max(used_ns, 0), _LATEST) - (_LATEST if strange else 0)

    def _apply_walk(self, found: _WalkResult, held_ledger: HeldLedger) -> None:
        """Remove the leftovers that a walk found, and adopt its list of files to evict."""
        if found.charged > held_ledger.used:
            # Files were added without being charged. Count again, so that evicting them can release bytes.
            held_ledger.count()
        self._oldest = {tenant: deque(files) for tenant, files in found.listed.items() if files}
        self._empty, self._more = found.listed.keys() - self._oldest.keys(), found.more
        # A writer holds a flock on its file, so a file that can be locked has no writer. But a shared mount
        # may hide the locks of other machines. So a file from there, or from before the last boot, must also
        # be old.
        here = boot_id()
        for entry in found.temporary:
            young = abs(self._clock() - entry.used_ns / 1e9) < _FOREIGN_LEFTOVER_SECONDS
            if (entry.boot != here and young) or _has_writer(entry.path):
                continue
            with suppress(OSError):
                os.unlink(entry.path)
                held_ledger.release(entry.charged, entry.path)
                self._counter.add(swept=1)


def quarantine_file(root: str, ledger: Ledger, found: os.stat_result, path: str) -> bool:
    """Move a bad file to quarantine, where its bytes still count. Return whether it was moved.

    The ledger is locked during the move. Nothing is moved if `path` is no longer the file `found`.
    """
    with suppress(LockTimeout, OSError), ledger.held() as held_ledger:
        check_folders(root, path)
        if os.path.samestat(found, os.lstat(path)):
            aside = f"{root}/{quarantine_name(*chunk_identity(path))}"
            try:
                make_folder(root, os.path.dirname(aside))
                os.rename(path, aside)
            except OSError as error:
                if not isinstance(error, NotRegular) and error.errno not in OUT_OF_ROOM:
                    raise
                # It must not stay: no process stores a chunk anew while a file with its name exists.
                os.unlink(path)
                # Count instead of release: something planted was never charged.
                held_ledger.count()
            else:
                return True
    return False


def _has_writer(path: str) -> bool:
    """Return whether a process writes a temporary file, or may do so because the file cannot be opened."""
    if not is_regular(path):
        return False
    try:
        fd = open_regular(path, os.O_RDWR)
    except OSError:
        # The file is gone, or belongs to another user.
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)


class LeastRecentlyUsed:
    """The `most` least recently used of the files that are added.

    >>> files = LeastRecentlyUsed(2)
    >>> for used_ns, path in (30, "c"), (10, "a"), (20, "b"):
    ...     files.add(used_ns, path)
    >>> files.listed(), files.more
    ([(10, 'a'), (20, 'b')], True)

    Attributes:
        more: whether files were added that `listed` has not returned.
    """

    def __init__(self, most: int = MAX_LISTED) -> None:
        self.more = False
        self._most, self._kept = most, list[tuple[int, str]]()
        self._latest: int | None = None

    def add(self, used_ns: int, path: str) -> None:
        # Newer than all that a full selection kept: it can never be selected.
        if self._latest is not None and used_ns >= self._latest:
            return
        self._kept.append((used_ns, path))
        if len(self._kept) > 2 * self._most:
            self._kept, self.more = _first(self._kept, self._most), True
            self._latest = self._kept[-1][0]

    def listed(self) -> list[tuple[int, str]]:
        """Return ranks and paths of the files in order."""
        self.more |= len(self._kept) > self._most
        return _first(self._kept, self._most)


def _first(files: list[tuple[int, str]], most: int) -> list[tuple[int, str]]:
    # numpy sorts without the GIL, so an engine's threads run meanwhile.
    used = np.fromiter((used_ns for used_ns, _ in files), np.int64, len(files))
    return [files[at] for at in np.argsort(used, kind="stable")[:most]]
