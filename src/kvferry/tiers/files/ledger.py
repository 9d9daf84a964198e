"""The ledger of a directory: its capacity, bytes in use and write budget, shared by all its processes.

The ledger is one small file. A process reads and writes it under an exclusive flock, which its threads hand
to one another. The bytes in use are never less than the sum of all kvferry files: bytes are added (*charged*)
before a file is created, and subtracted (*released*) after it is removed. If a process is killed in between,
the number is too large until `count` corrects it.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Condition
from typing import NamedTuple

from kvferry.common.machine import fcntl
from kvferry.tiers.files.chunk_file import open_regular, read_regular
from kvferry.tiers.files.tenant_table import MOST_BYTES, TenantTable, parse_table
from kvferry.tiers.format.chunk import header_digest
from kvferry.tiers.paths import LEDGER, EntryKind, tenant_of_path, walk
from kvferry.tiers.write_budget import WriteBudget

LEDGER_BYTES = 64
_MAGIC = b"KVFLEDGR"
_VERSION = 1
_MOST = (1 << 64) - 1
_FIELDS = struct.Struct("<8s II QQ QQ")
_MICROSECONDS = 10**6
_DIGEST_BYTES = LEDGER_BYTES - _FIELDS.size

# Time after which a process leaves the lock to others.
_HOLD_SECONDS = 0.020
# Pause between two attempts to take the lock.
_RETRY_SECONDS = 0.001
# Pause before a process takes the lock again. It is longer, so that another process can be first.
_LEAVE_SECONDS = 0.002


class LockTimeout(Exception):
    """Raised if other threads or processes held a lock until the time limit."""


class _Content(NamedTuple):
    """What a ledger says: capacity and bytes in use, and the write budget; None for no limit."""

    capacity: int
    used: int
    budget: WriteBudget | None


class HeldLedger:
    """The content of a ledger while this process holds its lock. Every change is written at once.

    A new or damaged file gets `capacity` and `write_per_day`, and is `lost`: `used` was counted anew. `fd` is
    the locked file. `tenants` has the bytes of each tenant, which the names of files contain. A process that
    is killed during a change may leave a tenant's bytes too large, until `count`.
    """

    def __init__(self, fd: int, root: str, capacity: int, write_per_day: int = 0) -> None:
        self.fd = fd
        self.tenants = TenantTable(fd, LEDGER_BYTES)
        self._root = root
        found = _parse(os.pread(fd, LEDGER_BYTES, 0))
        self.lost = found is None
        self._content = found or _Content(capacity, 0, _budget(write_per_day))
        if found is None:
            self.count()

    @property
    def capacity(self) -> int:
        return self._content.capacity

    @property
    def used(self) -> int:
        return self._content.used

    @property
    def budget(self) -> WriteBudget | None:
        return self._content.budget

    def charge(self, size: int, path: str) -> None:
        """Add the bytes of a file to those in use. Call this before the file is created."""
        self._set(self._content._replace(used=self.used + self.cost(size, path)))
        if (tenant := tenant_of_path(path)) is not None:
            self.tenants.add(tenant, size)

    def cost(self, size: int, path: str) -> int:
        """Return the bytes that are in use for a file of `size` bytes, with the record of a new tenant."""
        tenant = tenant_of_path(path)
        return size if tenant is None else size + self.tenants.growth(tenant)

    def release(self, size: int, path: str) -> None:
        """Subtract the bytes of a file from those in use. Call this after the file was removed."""
        self._set(self._content._replace(used=max(0, self.used - size)))
        if (tenant := tenant_of_path(path)) is not None:
            self.tenants.add(tenant, -size)

    def limit(self, capacity: int) -> None:
        """Set the capacity, for all processes that use the directory."""
        self._set(self._content._replace(capacity=capacity))

    def limit_writes(self, per_day: int) -> None:
        """Set the bytes that may be written per day, for all processes; 0 for no limit."""
        # What was written lately counts for the new limit too.
        full_at = self.budget.full_at if self.budget else 0.0
        self._set(self._content._replace(budget=_budget(per_day, full_at)))

    def charge_write(self, size: int, now: float) -> None:
        """Subtract a write of `size` bytes from the budget. `now` is in seconds since 1970."""
        if self.budget is not None:
            self._set(self._content._replace(budget=self.budget.after_write(size, now)))

    def count(self) -> None:
        """Walk the directory, and set the bytes in use to the sum of all kvferry files."""
        found = Counter[bytes | None]()
        for entry in walk(self._root):
            if entry.kind is not EntryKind.LEDGER:
                found[tenant_of_path(entry.path)] += entry.charged
        self.tenants.replace({tenant: size for tenant, size in found.items() if tenant is not None})
        # Count the ledger with its full size, because its first write may be this one.
        self._set(self._content._replace(used=LEDGER_BYTES + self.tenants.size + found.total()))

    def _set(self, content: _Content) -> None:
        # The name of a temporary file may claim any number of reserved bytes.
        used = min(content.used, _MOST)
        budget = content.budget or WriteBudget(0)
        full_at = int(budget.full_at * _MICROSECONDS)
        fields = _FIELDS.pack(_MAGIC, _VERSION, 0, content.capacity, used, budget.bytes_per_day, full_at)
        os.pwrite(self.fd, fields + header_digest(fields)[:_DIGEST_BYTES], 0)
        self._content = content._replace(used=used)


@dataclass
class _WaitingThreads:
    """The state of a ledger's lock in one process."""

    pid: int
    changed: Condition = field(default_factory=Condition)  # notified when a thread has finished with the lock
    waiting: int = 0  # number of waiting threads
    busy: bool = False  # whether a thread holds the lock or is taking it
    held_ledger: HeldLedger | None = None  # None while this process does not have the lock
    since: float = 0.0  # monotonic seconds at which this process took the lock
    must_pause: bool = False  # whether to pause before the next take, so that another process can be first


class Ledger:
    """The ledger of one directory, and its lock, which excludes other processes and threads. Thread-safe.

    Taking the lock costs several system calls, so a thread hands it to the next that waits:

        free ─take─▶ used ─another thread waits─▶ handed over ─▶ used
        used ─no thread waits, or after 20 ms─▶ free

    Attributes:
        capacity: last known capacity in bytes, 0 if unknown. A new ledger file gets this value.
        write_per_day: last known limit on the bytes written per day, 0 for none, likewise.
        after_loss: called with the held ledger after this object has replaced a missing or damaged file.
        after_swap: called when another directory has replaced the one at `root`. It raises OSError to refuse
            the new one.
    """

    def __init__(
        self,
        root: str,
        lock_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.capacity = self.write_per_day = 0
        self.after_loss: Callable[[HeldLedger], None] = lambda _: None
        self.after_swap: Callable[[], None] = lambda: None
        self._root, self._path, self._lock_seconds = root, f"{root}/{LEDGER}", lock_seconds
        self._clock, self._sleep = clock, sleep
        self._known: os.stat_result | None = None
        self._own = _WaitingThreads(os.getpid())

    @property
    def waiting(self) -> int:
        """Number of threads of this process that wait for the lock."""
        return self._own.waiting

    @contextmanager
    def held(self, seconds: float | None = None) -> Iterator[HeldLedger]:
        """Lock the ledger for this thread. No other thread or process then adds or evicts files.

        Raises:
            LockTimeout: others held the ledger for `seconds`, or `lock_seconds` if that is None.
            OSError: the file cannot be opened or written. The errno is ESTALE if its version is unknown, or
                if another device is mounted at `root` than at the first use.
        """
        seconds = self._lock_seconds if seconds is None else seconds
        deadline = self._clock() + seconds
        if self._own.pid != os.getpid():
            # After a fork. The copy of the descriptor keeps the parent's flock alive; the condition may be
            # held for good.
            inherited, self._own = self._own, _WaitingThreads(os.getpid())
            if inherited.held_ledger is not None:
                self._release(inherited.held_ledger)
        queue = self._own
        self._enter(queue, seconds)
        succeeded = False
        try:
            if queue.held_ledger is None:
                if queue.must_pause:
                    self._sleep(_LEAVE_SECONDS)
                queue.held_ledger = self._take(deadline)
                queue.since = self._clock()
            yield queue.held_ledger
            succeeded = True
        finally:
            self._leave(queue, succeeded=succeeded)

    def _enter(self, queue: _WaitingThreads, seconds: float) -> None:
        with queue.changed:
            queue.waiting += 1
            try:
                if not queue.changed.wait_for(lambda: not queue.busy, seconds):
                    raise LockTimeout(f"{self._path} was held by this process for {seconds:g} s")
                queue.busy = True
            finally:
                queue.waiting -= 1

    def _leave(self, queue: _WaitingThreads, *, succeeded: bool) -> None:
        with queue.changed:
            # After an error the state of the file is unknown. It is opened again for the next thread.
            long = self._clock() - queue.since > _HOLD_SECONDS
            queue.must_pause = long and queue.waiting > 0
            held_ledger = queue.held_ledger
            try:
                if held_ledger is not None and (long or not succeeded or not queue.waiting):
                    queue.held_ledger = None
                    self._release(held_ledger)
            finally:
                queue.busy = False
                queue.changed.notify()

    def _take(self, deadline: float) -> HeldLedger:
        """Take the lock until a deadline in seconds of the clock, or raise `LockTimeout`."""
        fd = self._lock(deadline)
        try:
            held_ledger = HeldLedger(fd, self._root, self.capacity, self.write_per_day)
            self.write_per_day = held_ledger.budget.bytes_per_day if held_ledger.budget else 0
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

    def _release(self, held_ledger: HeldLedger) -> None:
        # A mount may report an error of earlier writes here. The file is closed in any case.
        with suppress(OSError):
            os.close(held_ledger.fd)

    def _lock(self, deadline: float) -> int:
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
            # flock could wait in the kernel, but without a deadline.
            self._sleep(_RETRY_SECONDS)

    def _open(self) -> int:
        """Open the ledger file of the same directory as before, or of one that `after_swap` accepts."""
        # An unmounted disk leaves an empty folder on another disk, which must not be filled.
        found, known = os.stat(self._root), self._known
        if known is not None and found.st_dev != known.st_dev:
            raise OSError(errno.ESTALE, "another file system is mounted here than at the start", self._root)
        if known is not None and found.st_ino != known.st_ino:
            self.after_swap()
        self._known = found
        return open_regular(self._path, os.O_RDWR | os.O_CREAT)


def read_ledger(root: str) -> tuple[int, int] | None:
    """Return capacity and bytes in use without locking; None if the ledger cannot be read."""
    found = _read(root)
    return None if found is None else (found.capacity, found.used)


def read_write_budget(root: str) -> WriteBudget | None:
    """Return the write budget without locking; None if there is none or the ledger cannot be read."""
    found = _read(root)
    return None if found is None else found.budget


def _read(root: str) -> _Content | None:
    try:
        return _parse(read_regular(f"{root}/{LEDGER}", LEDGER_BYTES))
    except OSError:
        return None


def read_used_by_tenant(root: str) -> dict[bytes, int]:
    """Return the bytes in use by tenant without locking; empty if the ledger cannot be read."""
    try:
        data = read_regular(f"{root}/{LEDGER}", LEDGER_BYTES + MOST_BYTES)
        found = _parse(data[:LEDGER_BYTES])
    except OSError:
        return {}
    return {} if found is None else parse_table(data[LEDGER_BYTES:])


def _budget(per_day: int, full_at: float = 0.0) -> WriteBudget | None:
    return WriteBudget(per_day, full_at) if per_day else None


def _parse(data: bytes) -> _Content | None:
    """Return what a ledger says; None if it is damaged. Raise OSError for an unknown format version."""
    fields = data[: _FIELDS.size]
    if len(data) != LEDGER_BYTES or data[_FIELDS.size :] != header_digest(fields)[:_DIGEST_BYTES]:
        return None
    # The digest is checked first, so a version is believed only in a ledger that was written completely.
    magic, version, _, capacity, used, per_day, full_at = _FIELDS.unpack(fields)
    if magic != _MAGIC:
        return None
    # Not damage: replacing a newer release's ledger would lose its capacity.
    if version != _VERSION:
        told = f"its ledger is of version {version}, this release knows version {_VERSION}"
        raise OSError(errno.ESTALE, told)
    return _Content(capacity, used, _budget(per_day, full_at / _MICROSECONDS))
