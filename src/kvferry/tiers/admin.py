"""Operator commands on a cache: all kvferry files in one directory or under one URL of object storage.

Kinds of storage implement `CacheAdmin`. The surveys here use it, and change nothing, except that `verify_all`
may quarantine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from kvferry.common.errors import ChunkError, OtherVersion, Unnameable
from kvferry.keys.namespace import Namespace
from kvferry.tiers.files.chunk_file import FIRST_USE_NS
from kvferry.tiers.format.chunk import Buffer
from kvferry.tiers.format.decode import read_header, verify
from kvferry.tiers.paths import CacheEntry, EntryKind, chunk_identity

_LONGEST_NOTE = 1 << 20
# Files that are read at once, because each read from remote storage begins with a delay.
_THREADS = 8
# Files that are handed to the threads at once. Millions of pending results would take a lot of memory.
_BATCH = 1024

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class SpaceUsage:
    """The capacity of a cache, and the free room of its disk. Unknown values are None."""

    capacity: int | None = None  # maximum bytes of all files of the cache together
    charged: int | None = None  # bytes in use, with space that is reserved for chunks being written
    free: int | None = None  # free bytes on the disk
    free_files: int | None = None  # free inodes on the disk
    write_per_day: int | None = None  # bytes that may be written per day; None for no limit
    write_budget_left: float | None = None  # share of an hour's budget that is left now, 0 to 1


@dataclass(frozen=True, slots=True)
class CollectResult:
    """The result of `CacheAdmin.collect`."""

    swept: int  # number of removed temporary files of dead writers
    evicted: int  # number of evicted files: chunks, and bad chunks in quarantine
    evicted_bytes: int
    charged: int  # bytes in use after the eviction
    capacity: int  # limit that was applied to the bytes in use


class StoredFile(Protocol):
    """A file or object that is open for reading. Callers must check its content for damage."""

    size: int  # length of the file in bytes

    def read(self, offset: int, size: int) -> Buffer:
        """Return the `size` bytes at `offset`, or fewer if the file ends earlier."""
        ...

    def quarantine(self) -> bool:
        """Move the file to quarantine, where no engine reads it. Return whether it was moved.

        In a directory, nothing is moved if another file has replaced this one since it was opened.
        """
        ...


class CacheAdmin(Protocol):
    """A cache directory, or a cache under a URL of object storage, as operator commands use it.

    Engines may use the cache at the same time, so a file that was listed may be gone when a command opens it.
    All methods but `opened` raise ConfigError if the cache cannot be read or changed.

    Attributes:
        where: absolute path of the directory, or URL.
        records_use: whether the cache records when a file was last used. If False, `CacheEntry.used_ns` is
            the time at which the file was stored.
        no_capacity: text that tells the operator why the capacity is unknown.
    """

    where: str
    records_use: bool
    no_capacity: str

    def entries(self) -> Iterator[CacheEntry]:
        """Yield an entry for each file that kvferry has written into the cache."""
        ...

    def opened(self, entry: CacheEntry) -> AbstractContextManager[StoredFile]:
        """Open the file of an entry for reading, or raise OSError, such as FileNotFoundError."""
        ...

    def space(self) -> SpaceUsage: ...

    def collect(self, capacity: int | None = None) -> CollectResult:
        """Remove leftovers of dead writers, count the bytes in use, and evict down to a capacity.

        Files are evicted in the order of `CacheEntry.used_ns`. `capacity` is in bytes, and does not become
        that of the cache; None for the cache's own.
        """
        ...

    def clear(self) -> tuple[int, int]:
        """Remove all kvferry files, but no folders with other files. Return their number and bytes."""
        ...


@dataclass(frozen=True)
class NamespaceUsage:
    """The chunks of one namespace in a cache."""

    namespace: str  # digest of the namespace, 64 hex digits
    # Model and properties by the note of the namespace; empty if there is no valid note.
    name: str
    facts: dict[str, object]
    chunks: int
    tokens: int  # sum of the tokens of all chunks of the KV cache group that has the most
    total_bytes: int  # bytes of all chunk files
    # Earliest and latest time at which a chunk was last used, in seconds since 1970. If the cache does not
    # record uses, the time of storing counts instead. Cold chunks that nothing has used do not count. None if
    # there is no other chunk.
    oldest: float | None
    newest: float | None
    unreadable: int  # number of chunks with an unreadable or invalid header


@dataclass(frozen=True)
class CacheTotals:
    """The numbers of files and bytes in a cache, in total and for each kind of file."""

    path: str  # path of the directory, or the URL
    # As in `SpaceUsage`.
    capacity: int | None
    charged: int | None
    free: int | None
    free_files: int | None
    write_per_day: int | None
    write_budget_left: float | None
    total_bytes: int  # bytes of all kvferry files
    namespaces: int  # number of namespaces with at least one file
    chunks: int
    chunk_bytes: int
    # Number and bytes of files that are being written or were abandoned.
    temporary: int
    temporary_bytes: int
    quarantined: int
    quarantined_bytes: int


@dataclass(frozen=True)
class BadChunk:
    """A chunk file that failed a check."""

    path: str  # path or URL of the file
    why: str  # reason, in one sentence
    moved: bool  # whether the file was moved to quarantine


@dataclass(frozen=True)
class VerifyResult:
    """The result of `verify_all`."""

    chunks: int  # number of chunk files
    total_bytes: int  # bytes of all chunk files
    bad: tuple[BadChunk, ...]
    other_versions: int  # number of chunks of another format version, which this release cannot check


def namespace_usage(cache: CacheAdmin) -> list[NamespaceUsage]:
    """Read the header of every chunk, and return the usage of each namespace, sorted by digest."""
    found: dict[str, list[CacheEntry]] = {}
    for entry in cache.entries():
        if entry.namespace:
            found.setdefault(entry.namespace, []).append(entry)
    return [_usage_of(cache, namespace, entries) for namespace, entries in sorted(found.items())]


def cache_totals(cache: CacheAdmin) -> CacheTotals:
    """Count the files and bytes of a cache. The content of files is not read."""
    entries = list(cache.entries())
    kinds = {kind: [entry.size for entry in entries if entry.kind is kind] for kind in EntryKind}
    return CacheTotals(
        path=cache.where,
        **asdict(cache.space()),
        total_bytes=sum(entry.size for entry in entries),
        namespaces=len({entry.namespace for entry in entries if entry.namespace}),
        chunks=len(kinds[EntryKind.CHUNK]),
        chunk_bytes=sum(kinds[EntryKind.CHUNK]),
        temporary=len(kinds[EntryKind.TEMPORARY]),
        temporary_bytes=sum(kinds[EntryKind.TEMPORARY]),
        quarantined=len(kinds[EntryKind.QUARANTINED]),
        quarantined_bytes=sum(kinds[EntryKind.QUARANTINED]),
    )


def verify_all(cache: CacheAdmin, *, quarantine: bool = False) -> VerifyResult:
    """Check every byte of every chunk of a cache. If `quarantine`, move bad chunks there."""
    chunks = [entry for entry in cache.entries() if entry.kind is EntryKind.CHUNK]
    found = list(_parallel_map(chunks, lambda entry: _check(cache, entry, quarantine)))
    return VerifyResult(
        len(chunks),
        sum(entry.size for entry in chunks),
        tuple(one for one in found if isinstance(one, BadChunk)),
        sum(isinstance(one, OtherVersion) for one in found),
    )


def _parallel_map(entries: Sequence[CacheEntry], read: Callable[[CacheEntry], _Read]) -> Iterator[_Read]:
    """Call `read` for each entry on several threads, and yield the results in the order of the entries."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for at in range(0, len(entries), _BATCH):
            yield from pool.map(read, entries[at : at + _BATCH])


def _check(cache: CacheAdmin, entry: CacheEntry, quarantine: bool) -> BadChunk | OtherVersion | None:
    """Check a chunk file. Return what is wrong; None if the chunk is good, or gone."""
    try:
        with cache.opened(entry) as opened:
            try:
                header = verify(opened.read, opened.size)
                if (header.chunk.namespace, header.chunk.key) != chunk_identity(entry.path):
                    raise ChunkError(
                        f"it holds the chunk of key {header.chunk.key.hex()}, expected the one of its name"
                    )
            except OtherVersion as error:
                return error
            except ChunkError as error:
                return BadChunk(entry.path, str(error), quarantine and opened.quarantine())
    except FileNotFoundError:
        return None
    except OSError as error:
        return BadChunk(entry.path, error.strerror or str(error), moved=False)
    return None


def _usage_of(cache: CacheAdmin, namespace: str, entries: Sequence[CacheEntry]) -> NamespaceUsage:
    chunks = [entry for entry in entries if entry.kind is EntryKind.CHUNK]
    contents = list(_parallel_map(chunks, lambda entry: _read_groups(cache, entry)))
    tokens = Counter[str]()
    for content in contents:
        tokens.update(content or {})
    used = [entry.used_ns / 1e9 for entry in chunks if entry.used_ns >= FIRST_USE_NS]
    notes = (_read_note(cache, entry) for entry in entries if entry.kind is EntryKind.NOTE)
    # A note that was copied from elsewhere describes another namespace.
    note = next((one for one in notes if one and one.digest.hex() == namespace), None)
    return NamespaceUsage(
        namespace=namespace,
        name=note.name if note else "",
        facts=note.facts if note else {},
        chunks=len(chunks),
        # Groups store the same prompts, so their tokens are not added.
        tokens=max(tokens.values(), default=0),
        total_bytes=sum(entry.size for entry in chunks),
        oldest=min(used, default=None),
        newest=max(used, default=None),
        unreadable=contents.count(None),
    )


def _read_groups(cache: CacheAdmin, entry: CacheEntry) -> dict[str, int] | None:
    """Return the tokens in a chunk by group; none if the file is gone, None if its header cannot be read."""
    try:
        with cache.opened(entry) as opened:
            groups = read_header(opened.read, opened.size).chunk.groups
    except FileNotFoundError:
        return {}
    except (ChunkError, OSError):
        return None
    return {group.name: group.tokens for group in groups}


def _read_note(cache: CacheAdmin, entry: CacheEntry) -> Namespace | None:
    try:
        with cache.opened(entry) as opened:
            return Namespace.read(bytes(opened.read(0, _LONGEST_NOTE)).decode("ascii"))
    except (OSError, ValueError, Unnameable):
        return None
