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
from dataclasses import dataclass

from kvferry.errors import ChunkError
from kvferry.keys.namespace import Namespace
from kvferry.tiers.aside import set_aside
from kvferry.tiers.checksum import Buffer
from kvferry.tiers.chunk_io import read_header, read_into, write_all
from kvferry.tiers.decode import Header, check_units
from kvferry.tiers.format import Chunk, Group, encode
from kvferry.tiers.index import Index
from kvferry.tiers.ledger import Busy, Ledger
from kvferry.tiers.opening import check_directory, take_into_use
from kvferry.tiers.outcome import Get, Put, Tally, TierStats
from kvferry.tiers.place import chunk_path, key_of
from kvferry.tiers.room import Full, Room

_log = logging.getLogger(__name__)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The second, on a network mount, of a file that went while it was open.
_EVICTED = (errno.ENOENT, errno.ESTALE)
# Using a file again so soon is not noted: on a shared mount each note is a message.
_USE_SECONDS = 10.0

_ADVICE = {
    Put.TOO_LARGE: "raise the capacity or store smaller chunks",
    Put.FULL: "raise the capacity",
    Put.NO_SPACE: "lower the capacity or free space",
    Put.BUSY: "see which process holds it, or whether the mount hangs",
    Put.IO_ERROR: "see to the disk or mount",
    Get.CORRUPT: "see to the disk; the file was moved aside and is computed anew",
    Get.OTHER_SHAPE: "the namespace is the same, the groups are not: tell kvferry's authors",
    Get.IO_ERROR: "see to the disk or mount",
}


@dataclass(frozen=True, slots=True)
class Part:
    """What is stored of one group.

    Attributes:
        group: its name, tokens and sections.
        data: the bytes of each section, in their order; read, not kept.
    """

    group: Group
    data: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Units that are fetched.

    Attributes:
        group: as the chunk must have it, in full: another shape is a miss.
        section: name of one of its sections.
        first: the first unit.
        units: how many, at least 1.
        into: memory for just these units, contiguous and writable.
    """

    group: Group
    section: str
    first: int
    units: int
    into: bytearray | memoryview

    def __post_init__(self) -> None:
        found = next((one for one in self.group.sections if one.name == self.section), None)
        if found is None:
            raise ChunkError(f"section {self.section} is wanted of group {self.group.name}, which has none")
        if not (self.first >= 0 and 1 <= self.units <= found.units - self.first):
            last = self.first + self.units - 1
            raise ChunkError(f"units {self.first} to {last} are wanted of {found.units} of {self.section}")
        size = memoryview(self.into).nbytes
        if size != self.units * found.unit_bytes:
            raise ChunkError(f"memory of {size} bytes for {self.units} units of {found.unit_bytes}")


class FileStore:
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

    Raises:
        ConfigError: the path is missing, cannot be written, is of another version, or the capacity is more
            than the disk has.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        namespace: Namespace,
        *,
        capacity: int | None = None,
        durable: bool = False,
        clock: Callable[[], float] = time.time,
        lock_seconds: float = 2.0,
    ) -> None:
        self._root = os.path.abspath(path)
        self._namespace = namespace.digest
        self._durable = durable
        self._clock = clock
        self._tally = Tally()
        check_directory(self._root)
        self._index = Index(self._root, self._namespace, clock)
        self._ledger = Ledger(self._root, lock_seconds)
        self._room = Room(self._root, self._ledger, self._tally, self._gone, clock)
        take_into_use(self._root, self._ledger, self._room, namespace, capacity)
        self._index.refresh()

    @property
    def stats(self) -> TierStats:
        """What this process did with the directory since it was opened."""
        return self._tally.stats()

    def __len__(self) -> int:
        """Chunks of the namespace, as far as is known."""
        return len(self._index)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are there, as far as is known; a fetch may still find one evicted.

        Those that are not known are looked for on the disk, one look each.
        """
        return self._index.contains(keys)

    def refresh(self) -> int:
        """Learn what other processes stored and evicted; says how many folders had changed."""
        return self._index.refresh()

    def put(self, key: bytes, parts: Sequence[Part]) -> Put:
        """Keep a chunk.

        Args:
            key: 16 to 32 bytes.
            parts: one per group, at least one.

        Raises:
            ChunkError: parts that are no chunk: sizes that are not those of the sections, names twice.
        """
        chunk = Chunk(self._namespace, key, tuple(part.group for part in parts))
        pieces = [section for part in parts for section in part.data]
        detail = ""
        try:
            done = self._put(chunk, pieces)
        except Busy as error:
            done, detail = Put.BUSY, str(error)
        except Full as error:
            done, detail = Put.TOO_LARGE if error.hopeless else Put.FULL, str(error)
        except OSError as error:
            done, detail = Put.NO_SPACE if error.errno in _NO_SPACE else Put.IO_ERROR, str(error)
        if not done.dropped:
            self._index.add(key)
        if self._tally.put(done, chunk.file_bytes) and done.dropped:
            self._warn(f"a chunk of {chunk.file_bytes} bytes is not stored", done, detail)
        return done

    def get(self, key: bytes, wanted: Sequence[Wanted]) -> Get:
        """Fetch units of a chunk.

        The memory of `wanted` is overwritten; unless this is a hit, what is in it means nothing.
        """
        detail = ""
        try:
            done = self._get(key, wanted)
        except OSError as error:
            done, detail = Get.ABSENT if error.errno in _EVICTED else Get.IO_ERROR, str(error)
            self._index.discard(key)
        except _Bad as bad:
            done, detail = Get.CORRUPT, str(bad)
            self._index.discard(key)
        if self._tally.get(done, sum(memoryview(one.into).nbytes for one in wanted)) and done in _ADVICE:
            self._warn(f"chunk {key.hex()} is not used", done, detail)
        return done

    def _put(self, chunk: Chunk, pieces: Sequence[Buffer]) -> Put:
        final = chunk_path(self._root, self._namespace, chunk.key)
        if os.path.exists(final):
            return Put.PRESENT
        image = encode(chunk, pieces)
        self._make_folder(final)
        fd, temporary = self._room.reserve(final, chunk.file_bytes)
        try:
            self._write(fd, image)
            first = self._room.commit(temporary, final, chunk.file_bytes)
        except BaseException:
            self._room.abandon(temporary, chunk.file_bytes)
            raise
        finally:
            os.close(fd)
        if self._durable:
            _sync(os.path.dirname(final))
        return Put.STORED if first else Put.PRESENT

    def _write(self, fd: int, image: Sequence[Buffer]) -> None:
        write_all(fd, image)
        now = int(self._clock() * 1e9)
        os.utime(fd, ns=(now, now))
        if self._durable:
            os.fdatasync(fd)

    def _make_folder(self, final: str) -> None:
        folder = os.path.dirname(final)
        if not os.path.isdir(folder):
            os.makedirs(folder, exist_ok=True)
            if self._durable:
                _sync(os.path.dirname(folder))

    def _get(self, key: bytes, wanted: Sequence[Wanted]) -> Get:
        path = chunk_path(self._root, self._namespace, key)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = read_header(fd)
            if (header.chunk.namespace, header.chunk.key) != (self._namespace, key):
                raise ChunkError(f"the chunk of key {header.chunk.key.hex()} under the name of {key.hex()}")
            if not {one.group for one in wanted} <= set(header.chunk.groups):
                return Get.OTHER_SHAPE
            for one in wanted:
                _fetch(fd, header, one)
            self._used(fd)
        except ChunkError as error:
            self._tally.add(quarantined=set_aside(self._root, self._ledger, fd, path))
            raise _Bad(f"{path}: {error}") from error
        finally:
            os.close(fd)
        return Get.HIT

    def _used(self, fd: int) -> None:
        now = self._clock()
        if now - os.fstat(fd).st_mtime >= _USE_SECONDS:
            # Whoever may read but not write uses chunks without being noticed.
            with suppress(OSError):
                os.utime(fd, ns=(int(now * 1e9),) * 2)

    def _gone(self, path: str) -> None:
        folder, name = os.path.split(path)
        key = key_of(name)
        if key is not None and folder.startswith(f"{self._root}/{self._namespace.hex()}/"):
            self._index.discard(key)

    def _warn(self, what: str, why: Put | Get, detail: str) -> None:
        said = f" ({detail})" if detail else ""
        _log.warning("file tier %s: %s: %s%s; %s", self._root, what, why, said, _ADVICE[why])


class _Bad(Exception):
    """A file that failed a check and was moved aside."""


def _fetch(fd: int, header: Header, one: Wanted) -> None:
    index = header.chunk.place(one.group.name, one.section)
    if index is None:
        raise ChunkError(f"no section {one.section}")
    section = header.chunk.sections[index]
    read_into(fd, header.chunk.offsets[index] + one.first * section.unit_bytes, one.into)
    check_units(header, index, one.first, memoryview(one.into).cast("B"))


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
