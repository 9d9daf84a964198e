"""The ledger of a directory: its capacity and its bytes in use, shared by all processes that use it.

The ledger is one small file. A process reads and writes it under an exclusive flock, which its threads hand
to one another (`lock_handoff`). The bytes in use are never less than the sum of all kvferry files: bytes are
added (*charged*) before a file is created, and subtracted (*released*) after it is removed. If a process is
killed in between, the number is too large until `count` corrects it.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvferry.operating_system import fcntl
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
    """The content of a directory's ledger file, while this process holds the lock of the file.

    The ledger records the capacity of the directory and the bytes in use. Every change is written to the file
    immediately.

    Args:
        fd: descriptor of the locked ledger file. `close` closes it.
        root: path of the directory.
        capacity: capacity in bytes that a new or damaged file gets; 0 if unknown.

    Attributes:
        capacity: maximum bytes of all kvferry files together; 0 if unknown.
        used: bytes in use, never less than the sum of all kvferry files.
        lost: whether the ledger file was new or damaged. If so, `used` was computed from the files of the
            directory.
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
        """Release the lock of the ledger by closing its file."""
        # A mount may report an error of earlier writes here. The file is closed in any case.
        with suppress(OSError):
            os.close(self._fd)

    def charge(self, size: int) -> None:
        """Add `size` bytes to the bytes in use. Call this before a file is created."""
        self._set(self.capacity, self.used + size)

    def release(self, size: int) -> None:
        """Subtract `size` bytes from the bytes in use. Call this after a file was removed."""
        self._set(self.capacity, max(0, self.used - size))

    def limit(self, capacity: int) -> None:
        """Set the capacity of the directory to `capacity` bytes, for all processes that use the directory."""
        self._set(capacity, self.used)

    def count(self) -> None:
        """Walk the directory, and set the bytes in use to the sum of all kvferry files."""
        # Count the ledger with its full size, because its first write may be this one.
        others = sum(entry.charged for entry in walk(self._root) if entry.kind is not EntryKind.LEDGER)
        self._set(self.capacity, LEDGER_BYTES + others)

    def _set(self, capacity: int, used: int) -> None:
        """Write the capacity and the bytes in use to the ledger file."""
        # The name of a temporary file may claim any number of reserved bytes.
        used = min(used, _MOST)
        fields = _FIELDS.pack(_MAGIC, _VERSION, 0, capacity, used)
        os.pwrite(self._fd, fields + _digest(fields), 0)
        self.capacity, self.used = capacity, used


class Ledger:
    """The ledger of one directory: a file with the directory's capacity and bytes in use, and a lock.

    Any thread may use the object.

    Args:
        root: path of the directory. If another device is mounted there after the first use of the ledger,
            every use raises OSError.
        lock_seconds: default maximum time to wait for the lock, which other threads or processes may hold.
        clock: function that returns monotonic seconds.
        sleep: function that waits a number of seconds.

    Attributes:
        capacity: last known capacity in bytes, 0 if unknown. If the ledger file is lost, the new file gets
            this value.
        after_loss: callback that runs after this object has replaced a missing or damaged ledger file. Its
            argument is the new ledger, whose lock is held.
        after_swap: callback that runs when another directory has replaced the one at `root`. It raises
            OSError to prevent the use of the new directory.
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
        self._lock_handoff = LockHandoff(self._path, self._acquire, HeldLedger.close, clock, sleep)

    @contextmanager
    def held(self, seconds: float | None = None) -> Iterator[HeldLedger]:
        """Return a context manager that locks the ledger and gives access to its capacity and bytes in use.

        While the ledger is locked, no other thread or process adds files to the directory or evicts them.

        Args:
            seconds: maximum time to wait for the lock; None for the `lock_seconds` of the constructor.

        Raises:
            LockTimeout: other threads or processes held the lock for that long.
            OSError: the ledger cannot be opened or written. The errno is ESTALE if the version of the ledger
                is unknown, or if the directory is now on another disk than at its first use.
        """
        with self._lock_handoff.held(self._lock_seconds if seconds is None else seconds) as held_ledger:
            yield held_ledger

    def _acquire(self, deadline: float) -> HeldLedger:
        """Lock and read the ledger file. Replace a missing or damaged file, and call `after_loss` then.

        Args:
            deadline: time at which to give up, in monotonic seconds.

        Raises:
            LockTimeout: other processes held the lock until the deadline.
            OSError: the file cannot be opened or written, or its version is unknown.
        """
        fd = self._lock(deadline)
        try:
            held_ledger = HeldLedger(fd, self._root, self.capacity)
            if held_ledger.capacity:
                self.capacity = held_ledger.capacity
            elif self.capacity:
                # Another process, which did not know the capacity, created the ledger anew.
                held_ledger.limit(self.capacity)
            if held_ledger.lost:
                self.after_loss(held_ledger)
        except BaseException:
            os.close(fd)
            raise
        return held_ledger

    def _lock(self, deadline: float) -> int:
        """Open and lock the ledger file, and return its descriptor.

        Args:
            deadline: time at which to give up, in monotonic seconds.

        Raises:
            LockTimeout: other processes held the lock until the deadline.
            OSError: the file cannot be opened.
        """
        start = self._clock()
        while True:
            fd = self._open()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # If the directory was cleared meanwhile, the locked file is not the ledger any more.
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
        """Check that the directory is still on the same disk, open the ledger file and return its descriptor.

        Raises:
            OSError: the directory is missing or now on another disk, `after_swap` has refused the directory
                that replaced it, or the file cannot be opened.
        """
        # An unmounted disk leaves an empty folder on another disk, which must not be filled.
        found, known = os.stat(self._root), self._known
        if known is not None and found.st_dev != known.st_dev:
            raise OSError(errno.ESTALE, "another file system is mounted here than at the start", self._root)
        if known is not None and found.st_ino != known.st_ino:
            self.after_swap()
        self._known = found
        return open_regular(self._path, os.O_RDWR | os.O_CREAT)


def read_ledger(root: str) -> tuple[int, int] | None:
    """Read the ledger file of a directory without locking it.

    Args:
        root: path of the directory.

    Returns:
        The capacity of the directory and its bytes in use; None if the ledger cannot be read.
    """
    try:
        return _parse(read_regular(f"{root}/{LEDGER}", LEDGER_BYTES))
    except OSError:
        return None


def _digest(fields: bytes) -> bytes:
    return header_digest(fields)[: LEDGER_BYTES - _FIELDS.size]


def _parse(data: bytes) -> tuple[int, int] | None:
    """Decode the content of a ledger file.

    Returns:
        The capacity and the bytes in use of the directory; None if the content is damaged.

    Raises:
        OSError: the content has a format version that this release does not know.
    """
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
