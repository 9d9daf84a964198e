"""Space for new files: reserve it, write the file, then commit or abandon it.

The least recently used file is evicted first, whether a chunk of any namespace or a quarantined file. Files
are listed in order of use outside the ledger's lock. Each is checked again before it is evicted, because
other processes use, evict and write files too.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from kvferry.tiers.files.least_recent import MAX_LISTED, least_recently_used
from kvferry.tiers.files.ledger import HeldLedger, Ledger
from kvferry.tiers.files.lock_handoff import LockTimeout
from kvferry.tiers.files.regular_file import check_folders, is_regular, open_regular
from kvferry.tiers.outcome import OutcomeCounter
from kvferry.tiers.paths import CacheEntry, EntryKind, boot_id, temporary_path, walk

# Where another machine's locks may not be seen, its temporary files are left alone for so long.
FOREIGN_LEFTOVER_SECONDS = 900.0

# A file that was used later than this from now has its time from a clock that was wrong.
_AHEAD_SECONDS = 300.0

_EVICTABLE = (EntryKind.CHUNK, EntryKind.QUARANTINED)
_LATEST = 1 << 62


class DirectoryFull(Exception):
    """An error for a file that no room can be made for.

    Attributes:
        too_large: whether the file is larger than the capacity.
    """

    def __init__(self, size: int, account: HeldLedger) -> None:
        super().__init__(f"{size} bytes do not fit; {account.used} of {account.capacity} are in use")
        self.too_large = size > account.capacity


@dataclass(frozen=True, slots=True)
class _Walked:
    """The result of a walk of the directory.

    Attributes:
        temporary: temporary files, of live and dead writers.
        listed: rank and path of evictable files, the first to be evicted first.
        more: whether there are more evictable files.
        charged: bytes that all files count for.
    """

    temporary: list[CacheEntry]
    listed: list[tuple[int, str]]
    more: bool
    charged: int


class DirectorySpace:
    """The space of one directory. Any thread may use it.

    Args:
        root: the directory.
        ledger: the ledger of the directory.
        tally: counter of evicted and swept files.
        gone: called with the path of every evicted file.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        root: str,
        ledger: Ledger,
        tally: OutcomeCounter,
        gone: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = root
        self._ledger = ledger
        self._tally = tally
        self._gone = gone
        self._clock = clock
        # Ranks and paths, of one walk; changed only while the ledger is held. What came or was
        # used after the walk, and what the walk saw but did not list, is newer than all of these.
        self._oldest: deque[tuple[int, str]] = deque()
        self._more = False
        self._walking = Lock()

    def reserve(self, final: str, size: int) -> tuple[int, str]:
        """Make room for a file and make an empty one under a temporary name.

        Returns:
            The descriptor of the file, open for writing and flocked, and its path.

        Raises:
            DirectoryFull: nothing is left to evict, or the file is larger than the capacity.
            LockTimeout: others held the ledger for too long.
            OSError: the file cannot be made.
        """
        with self._ledger.held() as account:
            if size > account.capacity:
                raise DirectoryFull(size, account)
            if self._evict_to(account, account.capacity - size):
                return self._create(account, final, size)
        # One thread walks; the others find that there is room, or something to evict.
        with self._walking:
            with self._ledger.held() as account:
                if self._evict_to(account, account.capacity - size):
                    return self._create(account, final, size)
            found = self._look()
            with self._ledger.held() as account:
                self._take_in(found, account)
                if self.make_room(account, size):
                    return self._create(account, final, size)
                # Before giving up: killed writers may have charged bytes for files that they never made.
                self.settle(account)
                if self.make_room(account, size):
                    return self._create(account, final, size)
                raise DirectoryFull(size, account)

    def commit(self, temporary: str, final: str, size: int) -> bool:
        """Rename a written file to its final name, unless another process stored the chunk first.

        Returns:
            Whether the file was renamed; if not, it is removed and its bytes are released.

        Raises:
            LockTimeout, OSError: the file cannot be renamed and still exists.
        """
        with self._ledger.held() as account:
            if not is_regular(final):
                os.rename(temporary, final)
                return True
            os.unlink(temporary)
            account.release(size)
            return False

    def abandon(self, temporary: str, size: int) -> None:
        """Remove a file that could not be written, and release its bytes.

        If it cannot be removed now, it stays empty and charged with the bytes in its name. The next sweep
        removes it after its writer has closed it.
        """
        with suppress(OSError):
            os.close(open_regular(temporary, os.O_WRONLY | os.O_TRUNC))
        # Held from before it is gone: who counts in between would not see it, and it would be released twice.
        with suppress(LockTimeout, OSError), self._ledger.held() as account:
            os.unlink(temporary)
            account.release(size)

    def settle(self, account: HeldLedger) -> None:
        """Remove leftovers of dead writers and count all files again, by walks of the directory."""
        self._take_in(self._look(), account)
        account.count()

    def make_room(self, account: HeldLedger, size: int = 0) -> bool:
        """Evict until another `size` bytes fit into the capacity; return whether they fit.

        The directory is walked again if more files must be evicted than are listed.
        """
        goal, before = account.capacity - size, -1
        while goal >= 0 and not self._evict_to(account, goal):
            if not self._more or account.used == before:
                return False
            before = account.used
            self._take_in(self._look(), account)
        return goal >= 0

    def _create(self, account: HeldLedger, final: str, size: int) -> tuple[int, str]:
        """Charge `size` bytes and make an empty temporary file for them."""
        check_folders(self._root, final)
        path, fd = temporary_path(final, size), -1
        account.charge(size)
        try:
            fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            # Nobody sweeps while the ledger is held, so nobody can have locked it.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if fd >= 0:
                os.close(fd)
                os.unlink(path)
            account.release(size)
            raise
        return fd, path

    def _evict_to(self, account: HeldLedger, goal: int) -> bool:
        while account.used > goal and self._oldest:
            rank, path = self._oldest.popleft()
            try:
                check_folders(self._root, path)
                status = os.lstat(path)
                if self._rank(status.st_mtime_ns, status.st_size) > rank:
                    # Used since: no older than what is not listed. The next walk lists it again.
                    continue
                os.unlink(path)
            except OSError:
                # Evicted by another process, or not ours to remove: the next one then.
                continue
            account.release(status.st_size)
            self._tally.add(evicted=1, evicted_bytes=status.st_size)
            self._gone(path)
        return account.used <= goal

    def _look(self) -> _Walked:
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

        listed, more = least_recently_used(evictable(), MAX_LISTED)
        return _Walked(temporary, listed, more, charged)

    def _rank(self, used_ns: int, size: int) -> int:
        """Return the rank of a file for eviction: its time of last use, in nanoseconds.

        A file with a time far in the future, or larger than the capacity, ranks before all others. Otherwise
        a file from the future would outlast all files stored until then.
        """
        ahead = used_ns / 1e9 - self._clock() > _AHEAD_SECONDS
        strange = ahead or size > (self._ledger.capacity or size)
        return min(max(used_ns, 0), _LATEST) - (_LATEST if strange else 0)

    def _take_in(self, found: _Walked, account: HeldLedger) -> None:
        """Sweep the leftovers of dead writers that a walk found, and list the evictable files."""
        if found.charged > account.used:
            # Others have put files there without a word. What is released has to have been charged.
            account.count()
        self._tally.add(swept=sweep(found.temporary, account, self._clock))
        self._oldest = deque(found.listed)
        self._more = found.more


def sweep(found: Sequence[CacheEntry], account: HeldLedger, clock: Callable[[], float] = time.time) -> int:
    """Remove leftovers of dead writers.

    A writer holds a flock on its file, so a file that can be locked has no writer. Files of another boot must
    also be older than 15 minutes, since a shared mount may not show the locks of other machines.

    Args:
        found: temporary files of the directory.
        account: the held ledger of the directory; the bytes are released.
        clock: seconds since 1970.

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
            account.release(entry.charged)
            swept += 1
    return swept


def _has_writer(path: str) -> bool:
    if not is_regular(path):
        return False
    try:
        fd = open_regular(path, os.O_RDWR)
    except OSError:
        # Gone, or another user's.
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)
