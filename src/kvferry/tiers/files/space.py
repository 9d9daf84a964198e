"""Space for new files in a directory. A writer reserves it, writes the file, then commits or abandons it.

To make room, the least recently used files are evicted: chunks of any namespace, and quarantined files. A
walk of the directory lists them in order of use, usually without the ledger's lock. Each file is checked
again before it is evicted, because other processes use, evict and write files too.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from kvferry.operating_system import fcntl
from kvferry.tiers.files.least_recent import MAX_LISTED, least_recently_used
from kvferry.tiers.files.ledger import HeldLedger, Ledger
from kvferry.tiers.files.lock_handoff import LockTimeout
from kvferry.tiers.files.regular_file import check_folders, is_regular, open_regular
from kvferry.tiers.outcome import OutcomeCounter
from kvferry.tiers.paths import CacheEntry, EntryKind, boot_id, folders, temporary_path, walk

# Minimum age of another machine's temporary file before it is removed, because its lock may not be visible.
FOREIGN_LEFTOVER_SECONDS = 900.0

# A file whose time is further in the future than this got it from a wrong clock.
_AHEAD_SECONDS = 300.0

_EVICTABLE = (EntryKind.CHUNK, EntryKind.QUARANTINED)
_LATEST = 1 << 62


class DirectoryFull(Exception):
    """Raised if a directory has no room for a file, even after eviction.

    Args:
        size: bytes of the file.
        held_ledger: ledger of the directory, with its capacity and bytes in use.

    Attributes:
        too_large: whether the file alone is larger than the capacity.
    """

    def __init__(self, size: int, held_ledger: HeldLedger) -> None:
        super().__init__(f"{size} bytes do not fit; {held_ledger.used} of {held_ledger.capacity} are in use")
        self.too_large = size > held_ledger.capacity


@dataclass(frozen=True, slots=True)
class _WalkResult:
    """The result of walking a directory, that is, of visiting all kvferry files in it.

    Attributes:
        temporary: entries of all temporary files, whether their writers are alive or dead.
        listed: ranks and paths of the files to evict first, in the order of eviction. `DirectorySpace._rank`
            derives the rank of a file from its time of last use.
        more: whether there are more evictable files than `listed` contains.
        charged: sum of `CacheEntry.charged` over all kvferry files.
    """

    temporary: list[CacheEntry]
    listed: list[tuple[int, str]]
    more: bool
    charged: int


class DirectorySpace:
    """Reserves space for new files in one directory, and evicts old files to make room.

    Any thread may use it.

    Args:
        root: path of the directory.
        ledger: ledger of the directory: a file with its capacity and its bytes in use, and a lock.
        counter: object that counts evicted files and removed temporary files.
        on_evicted: callback that gets the path of every evicted file.
        clock: function that returns seconds since 1970.
        max_listed: maximum number of files that a walk lists for eviction.
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
        self._root = root
        self._max_listed = max_listed
        self._ledger = ledger
        self._counter = counter
        self._on_evicted = on_evicted
        self._clock = clock
        # Ranks and paths of evictable files from the last walk; changed only while the ledger is held. Files
        # that were stored or used after the walk, and files that the walk did not list, are newer.
        self._oldest: deque[tuple[int, str]] = deque()
        self._more = False
        self._walking = Lock()

    def reserve(self, final: str, size: int) -> tuple[int, str]:
        """Make room for a file, and create an empty file under a temporary name.

        Args:
            final: path to which `commit` will rename the file.
            size: bytes of the complete file, which count as used from now on.

        Returns:
            The descriptor of the temporary file, open for writing and locked with flock, and its path.

        Raises:
            DirectoryFull: nothing is left to evict, or the file is larger than the capacity.
            LockTimeout: other threads or processes held the lock on the ledger (file that records the used
                space) for too long.
            OSError: the file cannot be created.
        """
        with self._ledger.held() as held_ledger:
            if size > held_ledger.capacity:
                raise DirectoryFull(size, held_ledger)
            if self._evict_to(held_ledger, held_ledger.capacity - size):
                return self._create(held_ledger, final, size)
        # One thread walks. The others wait, and then find that there is room, or files to evict.
        with self._walking:
            with self._ledger.held() as held_ledger:
                if self._evict_to(held_ledger, held_ledger.capacity - size):
                    return self._create(held_ledger, final, size)
            found = self._walk()
            with self._ledger.held() as held_ledger:
                self._apply_walk(found, held_ledger)
                if self.make_room(held_ledger, size):
                    return self._create(held_ledger, final, size)
                # Count again before giving up: killed writers may have charged bytes without creating a file.
                self.settle(held_ledger)
                if self.make_room(held_ledger, size):
                    return self._create(held_ledger, final, size)
                raise DirectoryFull(size, held_ledger)

    def commit(self, temporary: str, final: str, size: int) -> bool:
        """Rename a complete file to its final name, unless another writer has created a file there first.

        Args:
            temporary: path of the complete file.
            final: new path of the file.
            size: number of bytes that `reserve` has reserved for the file.

        Returns:
            True if the file was renamed. False if a file with the final name exists; then the complete file
            is removed, and its bytes are subtracted from the bytes in use.

        Raises:
            LockTimeout: other threads or processes held the lock on the ledger (file that records the used
                space) for too long. The file still exists.
            OSError: the file cannot be renamed or removed. The file still exists.
        """
        with self._ledger.held() as held_ledger:
            if not is_regular(final):
                os.rename(temporary, final)
                return True
            os.unlink(temporary)
            held_ledger.release(size)
            return False

    def abandon(self, temporary: str, size: int) -> None:
        """Remove a file that could not be written or committed, and subtract its bytes from the bytes in use.

        The file is truncated first. If it cannot be removed, its bytes count as used until a later `sweep`
        removes it. A sweep skips the file as long as its writer has it open.

        Args:
            temporary: path of the file.
            size: number of bytes that `reserve` has reserved for the file.
        """
        with suppress(OSError):
            os.close(open_regular(temporary, os.O_WRONLY | os.O_TRUNC))
        # Hold the ledger before removing the file. If it were counted in between, `release` would be wrong.
        with suppress(LockTimeout, OSError), self._ledger.held() as held_ledger:
            os.unlink(temporary)
            held_ledger.release(size)

    def settle(self, held_ledger: HeldLedger) -> None:
        """Remove temporary files of dead writers, and correct the bytes in use by counting all files again.

        This walks the whole directory two or three times while the ledger is locked, so it can take long.

        Args:
            held_ledger: ledger (capacity and bytes in use) of the directory, whose lock the caller holds.
        """
        self._apply_walk(self._walk(), held_ledger)
        held_ledger.count()

    def make_room(self, held_ledger: HeldLedger, size: int = 0) -> bool:
        """Evict files until another `size` bytes fit into the capacity; return whether they fit.

        The files are taken from a list that the last walk over the directory produced. When the list is used
        up, the directory is walked again.

        Args:
            held_ledger: ledger (capacity and bytes in use) of the directory, whose lock the caller holds.
            size: number of bytes to make room for. A negative number allows the bytes in use to exceed the
                capacity by that many bytes.
        """
        goal, before = held_ledger.capacity - size, -1
        while goal >= 0 and not self._evict_to(held_ledger, goal):
            if not self._more or held_ledger.used == before:
                return False
            before = held_ledger.used
            self._apply_walk(self._walk(), held_ledger)
        return goal >= 0

    def evict(self, size: int, folder: str = "") -> bool:
        """Evict at least one file, although the capacity has room, because the file system has none.

        Args:
            size: number of bytes to evict. If there are fewer, all of them are evicted.
            folder: path of a folder. If it is given, only the first of its listed files is evicted.

        Returns:
            Whether a file was evicted.

        Raises:
            LockTimeout: other threads or processes held the lock on the ledger for too long.
            OSError: the directory cannot be read.
        """
        with self._walking:
            with self._ledger.held() as held_ledger:
                evicted = self.evict_listed(held_ledger, size, folder)
                if evicted or self._oldest:
                    return evicted
            found = self._walk()
            with self._ledger.held() as held_ledger:
                self._apply_walk(found, held_ledger)
                # Folders of models that nobody serves any more keep inodes after their last chunk is evicted.
                for empty in list(folders(self._root)):
                    with suppress(OSError):
                        os.rmdir(empty)
                return self.evict_listed(held_ledger, size, folder)

    def evict_listed(self, held_ledger: HeldLedger, size: int, folder: str = "") -> bool:
        """Do what `evict` does, but evict only files that the last walk has listed.

        Args:
            held_ledger: ledger (capacity and bytes in use) of the directory, whose lock the caller holds.
            size, folder: as for `evict`.

        Returns:
            Whether a file was evicted.
        """
        before = held_ledger.used
        if not folder:
            self._evict_to(held_ledger, max(0, before - size))
        else:
            listed = (one for one in self._oldest if os.path.dirname(one[1]) == folder)
            while held_ledger.used == before and (one := next(listed, None)) is not None:
                self._evict(held_ledger, *one)
        return held_ledger.used < before

    def _create(self, held_ledger: HeldLedger, final: str, size: int) -> tuple[int, str]:
        """Count `size` bytes as used, and create an empty temporary file that has `size` in its name.

        Args:
            held_ledger: ledger (capacity and bytes in use) of the directory, whose lock the caller holds.
            final: path to which `commit` will rename the file.
            size: bytes of the complete file.

        Returns:
            The descriptor of the temporary file, and its path.

        Raises:
            OSError: the file cannot be created.
        """
        check_folders(self._root, final)
        path, fd = temporary_path(final, size), -1
        held_ledger.charge(size)
        try:
            fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            # This lock is free: only `sweep` tries to lock temporary files, and it needs the ledger.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if fd >= 0:
                os.close(fd)
                os.unlink(path)
            held_ledger.release(size)
            raise
        return fd, path

    def _evict_to(self, held_ledger: HeldLedger, goal: int) -> bool:
        """Evict files until at most `goal` bytes are in use, or the list of the last walk has no more files.

        Args:
            held_ledger: ledger (capacity and bytes in use) of the directory, whose lock the caller holds.
            goal: maximum number of bytes in use after the eviction.

        Returns:
            Whether at most `goal` bytes are in use now.
        """
        while held_ledger.used > goal and self._oldest:
            self._evict(held_ledger, *self._oldest.popleft())
        return held_ledger.used <= goal

    def _evict(self, held_ledger: HeldLedger, rank: int, path: str) -> None:
        """Evict a listed file, unless it was used after the walk, is gone, or cannot be removed.

        Args:
            held_ledger: ledger (capacity and bytes in use) of the directory, whose lock the caller holds.
            rank: rank of the file when the walk found it.
            path: path of the file.
        """
        try:
            check_folders(self._root, path)
            status = os.lstat(path)
            if self._rank(status.st_mtime_ns, status.st_size) > rank:
                # The file was used after the walk, so it is newer than the unlisted files.
                return
            os.unlink(path)
        except OSError:
            # Another process has evicted the file, or this user may not remove it.
            return
        held_ledger.release(status.st_size)
        self._counter.add(evicted=1, evicted_bytes=status.st_size)
        self._on_evicted(path)

    def _walk(self) -> _WalkResult:
        """Visit all kvferry files. List the temporary and the oldest evictable files, and sum up all bytes.

        Raises:
            OSError: a folder cannot be read.
        """
        temporary: list[CacheEntry] = []
        charged = 0

        def evictable() -> Iterator[tuple[int, str]]:
            nonlocal charged
            for entry in walk(self._root):
                charged += entry.charged
                if entry.kind in _EVICTABLE:
                    yield self._rank(entry.used_ns, entry.size), entry.path
                elif entry.kind is EntryKind.TEMPORARY:
                    temporary.append(entry)

        listed, more = least_recently_used(evictable(), self._max_listed)
        return _WalkResult(temporary, listed, more, charged)

    def _rank(self, used_ns: int, size: int) -> int:
        """Return the rank of a file for eviction. The file with the lowest rank is evicted first.

        The rank is the time of last use in nanoseconds. Two kinds of files rank below all others: a file
        larger than the capacity, and a file whose time is more than 5 minutes in the future. Such a time
        comes from a wrong clock, and would otherwise protect the file from eviction for a long time.

        Args:
            used_ns: time of last use, in nanoseconds since 1970.
            size: bytes of the file.
        """
        ahead = used_ns / 1e9 - self._clock() > _AHEAD_SECONDS
        strange = ahead or size > (self._ledger.capacity or size)
        return min(max(used_ns, 0), _LATEST) - (_LATEST if strange else 0)

    def _apply_walk(self, found: _WalkResult, held_ledger: HeldLedger) -> None:
        """Remove the temporary files of dead writers that a walk found, and adopt its list of files to evict.

        If the walk found more bytes than the ledger has in use, count the bytes in use again.

        Args:
            found: result of the walk.
            held_ledger: ledger (capacity and bytes in use) of the directory, whose lock the caller holds.
        """
        if found.charged > held_ledger.used:
            # Files were added without being charged. Count again, so that evicting them can release bytes.
            held_ledger.count()
        self._counter.add(swept=sweep(found.temporary, held_ledger, self._clock))
        self._oldest = deque(found.listed)
        self._more = found.more


def sweep(
    found: Sequence[CacheEntry], held_ledger: HeldLedger, clock: Callable[[], float] = time.time
) -> int:
    """Remove temporary files of dead writers, and subtract their bytes from the bytes in use.

    A writer holds a flock on its file, so a file that can be locked has no writer. But a shared mount may
    hide the locks of other machines. So a file from another machine, or from before the last boot of this
    machine, is only removed if it is also older than 15 minutes.

    Args:
        found: list of the temporary files in the directory.
        held_ledger: ledger (capacity and bytes in use) of the directory, whose lock the caller holds.
        clock: function that returns seconds since 1970.

    Returns:
        The number of removed files.
    """
    here, swept = boot_id(), 0
    for entry in found:
        young = abs(clock() - entry.used_ns / 1e9) < FOREIGN_LEFTOVER_SECONDS
        if (entry.boot != here and young) or _has_writer(entry.path):
            continue
        with suppress(OSError):
            os.unlink(entry.path)
            held_ledger.release(entry.charged)
            swept += 1
    return swept


def _has_writer(path: str) -> bool:
    """Return whether a process holds the lock of a temporary file, because it is writing the file.

    Return True also if the file cannot be opened, and False if the path is not a plain file.
    """
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
