"""The ledger of a directory: its capacity and its bytes in use, shared by all processes that use it.

The ledger is one small file. A process reads and writes it under an exclusive flock, which its threads hand
to one another (`lock_handoff`). The bytes in use are never less than the sum of all files: bytes are charged
before a file is made and released after it is removed. A process that is killed in between leaves the number
too large, and `count` corrects it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvferry.tiers.files.lock_handoff import LockHandoff, LockTimeout
from kvferry.tiers.files.regular_file import open_regular, read_regular
from kvferry.tiers.format.checksum import header_digest
from kvferry.tiers.paths import LEDGER, EntryKind, walk

LEDGER_BYTES = 64
_MAGIC = b"KVFLEDGR"
_VERSION = 1
_MOST = (1 << 64) - 1
_FIELDS = struct.Struct("<8s II QQ 16x")
_PAUSE_SECONDS = 0.001


class HeldLedger:
    """The ledger while this process holds its lock. Changes are written immediately.

    Attributes:
        capacity: maximum bytes of all files.
        used: bytes in use, never less than the sum of all files.
        lost: whether the ledger was unreadable, so that the files were counted again.
    """

    def __init__(self, fd: int, root: str, capacity: int) -> None:
        self._fd = fd
        self._root = root
        found = _parse(os.pread(fd, LEDGER_BYTES, 0))
        self.lost = found is None
        self.capacity, self.used = found or (capacity, 0)
        if found is None:
            self.count()

    def close(self) -> None:
        """Release the lock."""
        # What a mount reports only now is of writes that are over; the file is closed whatever it reports.
        with suppress(OSError):
            os.close(self._fd)

    def charge(self, size: int) -> None:
        """Add `size` bytes to the bytes in use, before a file uses them."""
        self._set(self.capacity, self.used + size)

    def release(self, size: int) -> None:
        """Subtract `size` bytes from the bytes in use, after their file is gone."""
        self._set(self.capacity, max(0, self.used - size))

    def limit(self, capacity: int) -> None:
        """Set the capacity for all processes."""
        self._set(capacity, self.used)

    def count(self) -> None:
        """Count the bytes of all files again, by a walk of the directory."""
        # The ledger counts as what it is after its first write, which may be this one.
        others = sum(entry.charged for entry in walk(self._root) if entry.kind is not EntryKind.LEDGER)
        self._set(self.capacity, LEDGER_BYTES + others)

    def _set(self, capacity: int, used: int) -> None:
        # A name may say that any number of bytes was reserved for it.
        used = min(used, _MOST)
        fields = _FIELDS.pack(_MAGIC, _VERSION, 0, capacity, used)
        os.pwrite(self._fd, fields + _digest(fields), 0)
        self.capacity, self.used = capacity, used


class Ledger:
    """The ledger of one directory, and its lock.

    Args:
        root: the directory, which must stay on the device where the ledger is first held.
        lock_seconds: default time to wait for other processes.
        clock: monotonic seconds.
        sleep: function that waits a number of seconds.

    Attributes:
        capacity: capacity in bytes for a ledger that is lost and made again.
        after_loss: callback after a lost ledger was made again, while it is held.
        after_swap: callback after another directory replaced the one before; raises OSError to refuse it.
    """

    def __init__(
        self,
        root: str,
        lock_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.capacity = 0
        self.after_loss: Callable[[HeldLedger], None] = lambda _: None
        self.after_swap: Callable[[], None] = lambda: None
        self._root = root
        self._path = f"{root}/{LEDGER}"
        self._lock_seconds = lock_seconds
        self._clock = clock
        self._sleep = sleep
        self._known: os.stat_result | None = None
        self._lock_handoff = LockHandoff(self._path, self._get, HeldLedger.close, clock, sleep)

    @contextmanager
    def held(self, seconds: float | None = None) -> Iterator[HeldLedger]:
        """Hold the ledger. Meanwhile no other process charges, releases, makes or renames a file.

        Args:
            seconds: time to wait; None for `lock_seconds`.

        Raises:
            LockTimeout: other threads or processes held the ledger for that long.
            OSError: the ledger cannot be opened or written, or another release wrote it; ESTALE if another
                disk is mounted at the directory than before.
        """
        with self._lock_handoff.held(self._lock_seconds if seconds is None else seconds) as account:
            yield account

    def _get(self, deadline: float) -> HeldLedger:
        fd = self._lock(deadline)
        try:
            account = HeldLedger(fd, self._root, self.capacity)
            if account.capacity:
                self.capacity = account.capacity
            elif self.capacity:
                # Made anew by a process that did not know it.
                account.limit(self.capacity)
            if account.lost:
                self.after_loss(account)
        except BaseException:
            os.close(fd)
            raise
        return account

    def _lock(self, deadline: float) -> int:
        start = self._clock()
        while True:
            fd = self._open()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever cleared the directory has unlinked what was locked here.
                if os.path.samestat(os.fstat(fd), os.stat(self._path)):
                    return fd
            except (BlockingIOError, FileNotFoundError):
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if (now := self._clock()) >= deadline:
                raise LockTimeout(f"{self._path} was held by other processes for {now - start:.2g} s")
            self._sleep(_PAUSE_SECONDS)

    def _open(self) -> int:
        # An unmounted disk leaves an empty folder on another one, which must not be filled.
        found, known = os.stat(self._root), self._known
        if known is not None and found.st_dev != known.st_dev:
            raise OSError(errno.ESTALE, "another file system is mounted here than at the start", self._root)
        if known is not None and found.st_ino != known.st_ino:
            self.after_swap()
        self._known = found
        return open_regular(self._path, os.O_RDWR | os.O_CREAT)


def read_ledger(root: str) -> tuple[int, int] | None:
    """Return the ledger's capacity and used bytes without holding it; None if it cannot be read."""
    try:
        return _parse(read_regular(f"{root}/{LEDGER}", LEDGER_BYTES))
    except OSError:
        return None


def _digest(fields: bytes) -> bytes:
    return header_digest(fields)[: LEDGER_BYTES - _FIELDS.size]


def _parse(data: bytes) -> tuple[int, int] | None:
    fields = data[: _FIELDS.size]
    if len(data) != LEDGER_BYTES or data[_FIELDS.size :] != _digest(fields):
        return None
    magic, version, _, capacity, used = _FIELDS.unpack(fields)
    if magic != _MAGIC:
        return None
    if version != _VERSION:
        told = f"its ledger is of version {version}, this release knows version {_VERSION}"
        raise OSError(errno.ESTALE, told)
    return capacity, used
