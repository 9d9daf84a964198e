"""Chunks in a directory: a disk of this machine, or a mount that several share.

Every call blocks, and any thread may make it. A fetch takes no lock: a chunk is written under another name
and renamed, so it is there whole or not at all, and what was read is compared with its checksums before it
counts. A store reserves its space before it writes, under the lock of the directory's ledger.

Neither raises because of a disk, a file or another process: they answer with what became of the chunk, count
it, and log the first of each kind.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvferry.errors import ChunkError
from kvferry.keys.namespace import Namespace
from kvferry.tiers.files.chunk_file import read_chunk, write_chunk
from kvferry.tiers.files.chunk_io import read_header
from kvferry.tiers.files.direct_io import set_direct
from kvferry.tiers.files.directory_index import DirectoryIndex
from kvferry.tiers.files.ledger import Ledger
from kvferry.tiers.files.lock_handoff import LockTimeout
from kvferry.tiers.files.opening import check_directory, open_directory
from kvferry.tiers.files.quarantine import quarantine_file
from kvferry.tiers.files.regular_file import NotRegular, check_folders, is_regular, make_folder, open_regular
from kvferry.tiers.files.space import DirectoryFull, DirectorySpace
from kvferry.tiers.files.usage import StoreUsage, UsageReader
from kvferry.tiers.format.body import check_body, check_size
from kvferry.tiers.format.chunk import Chunk, ChunkGroup
from kvferry.tiers.index.key_table import KeyTable, TierKeys
from kvferry.tiers.names import FILE
from kvferry.tiers.outcome import GetOutcome, OutcomeCounter, PutOutcome, TierStats
from kvferry.tiers.paths import chunk_path, key_of
from kvferry.tiers.storage_tier import StorageTier

_log = logging.getLogger(__name__)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The second, on a network mount, of a file that went while it was open.
_EVICTED = (errno.ENOENT, errno.ESTALE)
# Using a file again so soon is not noted: on a shared mount each note is a message.
_USE_SECONDS = 10.0
# Between notes of files that were used one after the other, so that there is an order.
_APART_NS = 1000

_ADVICE = {
    PutOutcome.TOO_LARGE: "raise the capacity or store smaller chunks",
    PutOutcome.FULL: "raise the capacity",
    PutOutcome.NO_SPACE: "lower the capacity or free space",
    PutOutcome.BUSY: "see which process holds it, or whether the mount hangs",
    PutOutcome.IO_ERROR: "see to the disk or mount",
    GetOutcome.CORRUPT: "see to the disk; the file was moved aside and is computed anew",
    GetOutcome.OTHER_SHAPE: "the namespace is the same, the group is not: tell kvferry's authors",
    GetOutcome.IO_ERROR: "see to the disk or mount",
}


class FileTier(StorageTier):
    """The chunks of one namespace in a directory, which may hold others and be used by other processes.

    Args:
        path: the directory, which exists.
        namespace: whose chunks are stored and fetched; its note is written if it is new.
        capacity: bytes that all files of kvferry under `path` may add up to. There is one capacity for all
            processes: the last that gave one set it. None: as it was; for a new directory a tenth of the free
            space.
        durable: flush every chunk and its folder to the disk before it counts as stored.
        clock: seconds since 1970; what is used is marked with it.
        lock_seconds: how long a store waits for the ledger before it is dropped.
        table: for the tags of all places of a cache.

    Raises:
        ConfigError: the path is missing, cannot be written, is of another version, or the capacity is more
            than the disk has.
    """

    name = FILE

    def __init__(
        self,
        path: str | os.PathLike[str],
        namespace: Namespace,
        *,
        capacity: int | None = None,
        durable: bool = False,
        clock: Callable[[], float] = time.time,
        lock_seconds: float = 2.0,
        table: KeyTable | None = None,
    ) -> None:
        self._root = os.path.abspath(path)
        self._namespace = namespace.digest
        self._durable = durable
        self._clock = clock
        self._tally = OutcomeCounter()
        check_directory(self._root)
        self.tags = TierKeys(table)
        self._index = DirectoryIndex(self._root, self._namespace, self.tags, clock)
        self._ledger = Ledger(self._root, lock_seconds)
        self._room = DirectorySpace(self._root, self._ledger, self._tally, self._gone, clock)
        open_directory(self._root, self._ledger, self._room, namespace, capacity)
        self._index.refresh()
        self._surveyor = UsageReader(self._root, namespace)

    @property
    def stats(self) -> TierStats:
        """What this process did with the directory since it was opened."""
        return self._tally.stats()

    def __len__(self) -> int:
        """Chunks of the namespace, as far as is known."""
        return len(self._index)

    def used(self, keys: Sequence[bytes]) -> None:
        """Note when chunks were used; see `StorageTier.used`.

        A note that is not old yet stays, unless the file would seem to have been used before one that was
        used earlier.
        """
        latest = 0
        for key, here in zip(keys, self.known(keys).tolist(), strict=True):
            # It may have gone; and whoever may read but not write uses chunks without being noticed.
            with suppress(OSError):
                latest = self._note(key, latest) if here else latest

    def had(self, key: bytes) -> bool:
        """Whether a chunk was known lately; see `StorageTier.had`."""
        return key in self._index.gone

    def around(self) -> StoreUsage:
        """What all that use the directory have taken of it; see `StorageTier.around`."""
        return self._surveyor.look(empty=not len(self._index))

    def refresh(self) -> int:
        """Learn what other processes stored and evicted; says how many folders had changed."""
        return self._index.refresh()

    def put(self, key: bytes, group: ChunkGroup, body: memoryview) -> PutOutcome:
        """Keep a chunk; see `StorageTier.put`."""
        chunk = Chunk(self._namespace, key, (group,))
        check_size(chunk, body)
        detail = ""
        try:
            done = self._put(chunk, body)
        except LockTimeout as error:
            done, detail = PutOutcome.BUSY, str(error)
        except DirectoryFull as error:
            done, detail = PutOutcome.TOO_LARGE if error.hopeless else PutOutcome.FULL, str(error)
        except OSError as error:
            done, detail = (
                PutOutcome.NO_SPACE if error.errno in _NO_SPACE else PutOutcome.IO_ERROR,
                str(error),
            )
        if not done.dropped:
            self._index.add(key)
        if self._tally.put(done, chunk.file_bytes) and done.dropped:
            self._warn(f"a chunk of {chunk.file_bytes} bytes is not stored", done, detail)
        return done

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        """Fetch a chunk; see `StorageTier.get`."""
        chunk = Chunk(self._namespace, key, (group,))
        check_size(chunk, into)
        detail = ""
        try:
            done = self._get(chunk, into)
        except OSError as error:
            done, detail = GetOutcome.ABSENT if error.errno in _EVICTED else GetOutcome.IO_ERROR, str(error)
        except _BadFile as bad:
            done, detail = GetOutcome.CORRUPT, str(bad)
        if done is not GetOutcome.HIT:
            self._index.discard(key)
        if self._tally.get(done, chunk.body_bytes) and done in _ADVICE:
            self._warn(f"chunk {key.hex()} is not used", done, detail)
        return done

    def close(self) -> None:
        """Nothing is open between calls."""

    def _put(self, chunk: Chunk, body: memoryview) -> PutOutcome:
        final = chunk_path(self._root, self._namespace, chunk.key)
        with suppress(FileNotFoundError):
            check_folders(self._root, final)
        if is_regular(final):
            return PutOutcome.PRESENT
        fd, temporary = self._reserve(final, chunk.file_bytes)
        try:
            self._write(fd, chunk, body)
            first = self._room.commit(temporary, final, chunk.file_bytes)
        except BaseException:
            self._room.abandon(temporary, chunk.file_bytes)
            raise
        finally:
            os.close(fd)
        if self._durable:
            _sync(os.path.dirname(final))
        return PutOutcome.STORED if first else PutOutcome.PRESENT

    def _write(self, fd: int, chunk: Chunk, body: memoryview) -> None:
        write_chunk(fd, chunk, body)
        now = int(self._clock() * 1e9)
        os.utime(fd, ns=(now, now))
        if self._durable:
            os.fdatasync(fd)

    def _reserve(self, final: str, size: int) -> tuple[int, str]:
        try:
            return self._room.reserve(final, size)
        except FileNotFoundError:
            folder = os.path.dirname(final)
            make_folder(self._root, folder)
            if self._durable:
                _sync(os.path.dirname(folder))
        return self._room.reserve(final, size)

    def _get(self, chunk: Chunk, into: memoryview) -> GetOutcome:
        path = chunk_path(self._root, self._namespace, chunk.key)
        check_folders(self._root, path)
        try:
            fd = open_regular(path, os.O_RDONLY)
        except NotRegular as error:
            self._tally.add(quarantined=quarantine_file(self._root, self._ledger, os.lstat(path), path))
            raise _BadFile(str(error)) from error
        try:
            good, status = read_chunk(fd, chunk, into), os.fstat(fd)
            if not good or status.st_size != chunk.file_bytes:
                return self._why_not(fd, chunk, into)
        except ChunkError as error:
            self._tally.add(quarantined=quarantine_file(self._root, self._ledger, os.fstat(fd), path))
            raise _BadFile(f"{path}: {error}") from error
        finally:
            os.close(fd)
        return GetOutcome.HIT

    def _why_not(self, fd: int, chunk: Chunk, into: memoryview) -> GetOutcome:
        """What is the matter with a file whose bytes are not those of a file of `chunk`.

        Raises:
            ChunkError: it is damaged, or not in its place.
        """
        set_direct(fd, on=False)
        header = read_header(fd)
        if (header.chunk.namespace, header.chunk.key) != (chunk.namespace, chunk.key):
            raise ChunkError(f"the chunk of key {header.chunk.key.hex()} under the name of {chunk.key.hex()}")
        if header.chunk != chunk:
            return GetOutcome.OTHER_SHAPE
        check_body(header, into)
        raise OSError(errno.EIO, "a header that was another when it was read again")

    def _note(self, key: bytes, latest: int) -> int:
        """A file was used now, and after what was used at `latest`; returns when that is, in nanoseconds."""
        path, now = chunk_path(self._root, self._namespace, key), int(self._clock() * 1e9)
        check_folders(self._root, path)
        last = os.lstat(path).st_mtime_ns
        # One far ahead is of a machine whose clock is wrong: all that follows would have to be farther ahead.
        if last <= latest or abs(now - last) >= _USE_SECONDS * 1e9:
            last = max(now, latest + _APART_NS)
            os.utime(path, ns=(last, last), follow_symlinks=False)
        return max(last, latest)

    def _gone(self, path: str) -> None:
        folder, name = os.path.split(path)
        key = key_of(name)
        if key is not None and folder.startswith(f"{self._root}/{self._namespace.hex()}/"):
            self._index.discard(key)

    def _warn(self, what: str, why: PutOutcome | GetOutcome, detail: str) -> None:
        said = f" ({detail})" if detail else ""
        _log.warning("file tier %s: %s: %s%s; %s", self._root, what, why, said, _ADVICE[why])


class _BadFile(Exception):
    """A file that failed a check and was moved aside."""


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
