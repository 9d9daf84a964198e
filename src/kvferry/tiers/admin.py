"""The protocol for operator commands on a cache: all kvferry files in one directory or under one URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kvferry.tiers.format.checksum import Buffer
from kvferry.tiers.paths import CacheEntry


@dataclass(frozen=True, slots=True)
class SpaceUsage:
    """The capacity of a cache, and the free room of its disk. Unknown values are None.

    Attributes:
        capacity: maximum bytes of all files of the cache together.
        charged: bytes in use, with space that is reserved for chunks being written.
        free: free bytes on the disk.
        free_files: free inodes on the disk.
    """

    capacity: int | None = None
    charged: int | None = None
    free: int | None = None
    free_files: int | None = None


@dataclass(frozen=True, slots=True)
class CollectResult:
    """The result of `CacheAdmin.collect`.

    Attributes:
        swept: number of removed temporary files of dead writers.
        evicted: number of evicted files: chunks, and bad chunks in quarantine.
        charged: bytes in use after the eviction.
        capacity: limit that was applied to the bytes in use.
    """

    swept: int
    evicted: int
    evicted_bytes: int
    charged: int
    capacity: int


class StoredFile(Protocol):
    """A file or object that is open for reading. Callers must check its content for damage.

    Attributes:
        size: length of the file in bytes.
    """

    size: int

    def read(self, offset: int, size: int) -> Buffer:
        """Return the `size` bytes at `offset`, or fewer if the file ends earlier.

        Raises:
            OSError: the file cannot be read.
        """
        ...

    def quarantine(self) -> bool:
        """Move the file to quarantine, where no engine reads it. Return whether it was moved.

        In a directory, nothing is moved if another file has replaced this one since it was opened.
        """
        ...


class CacheAdmin(Protocol):
    """A cache directory, or a cache under a URL of object storage, as operator commands use it.

    Engines may use the cache at the same time, so a file that was listed may be gone when a command opens it.

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
        """Yield an entry for each file that kvferry has written into the cache.

        Raises:
            ConfigError: the files cannot be listed.
        """
        ...

    def opened(self, entry: CacheEntry) -> AbstractContextManager[StoredFile]:
        """Open the file of an entry for reading.

        Raises:
            FileNotFoundError: the file is gone.
            OSError: it cannot be opened.
        """
        ...

    def space(self) -> SpaceUsage:
        """Return capacity, bytes in use, and free room.

        Raises:
            ConfigError: the free room cannot be read.
        """
        ...

    def collect(self, capacity: int | None = None) -> CollectResult:
        """Remove leftovers of dead writers, count the bytes in use, and evict down to a capacity.

        Files are evicted in the order of `CacheEntry.used_ns`, the earliest first.

        Args:
            capacity: maximum bytes in use after this call, which does not become the capacity of the cache.
                None for the capacity of the cache.

        Raises:
            ConfigError: the cache cannot be read or changed, others held the lock of its ledger for too long,
                or `capacity` is None and that of the cache is unknown.
        """
        ...

    def clear(self) -> tuple[int, int]:
        """Remove all kvferry files, but no folders with other files. Return their number and bytes.

        Raises:
            ConfigError: the cache cannot be read or changed, or others held the lock of its ledger for too
                long.
        """
        ...
