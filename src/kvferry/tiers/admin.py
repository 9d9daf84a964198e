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
    """The capacity of a cache, its bytes in use, and the free room of its disk. Unknown values are None.

    Attributes:
        capacity: maximum bytes of all files of the cache together.
        charged: bytes in use, as recorded by the cache; includes space reserved for chunks being written.
        free: free bytes on the disk.
        free_files: free inodes on the disk.
    """

    capacity: int | None = None
    charged: int | None = None
    free: int | None = None
    free_files: int | None = None


@dataclass(frozen=True, slots=True)
class CollectResult:
    """The result of `CacheAdmin.collect`, which evicts files until a cache fits into a capacity.

    Attributes:
        swept: number of removed temporary files of dead writers.
        evicted: number of evicted files: chunks in the cache, and bad chunks in quarantine.
        evicted_bytes: bytes of the evicted files.
        charged: bytes in use after the eviction.
        capacity: limit that was applied to the bytes in use.
    """

    swept: int
    evicted: int
    evicted_bytes: int
    charged: int
    capacity: int


class StoredFile(Protocol):
    """A file or object of a cache that is open for reading. Callers must check its content for damage.

    Attributes:
        size: length of the file in bytes.
    """

    size: int

    def read(self, offset: int, size: int) -> Buffer:
        """Return the `size` bytes at `offset` of the file, or fewer if the file ends earlier.

        Raises:
            OSError: the file cannot be read.
        """
        ...

    def quarantine(self) -> bool:
        """Move the file to quarantine, where no engine reads it. Return whether the file was moved.

        In a cache directory, nothing is moved if another file has replaced this file since it was opened.
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
        """Yield an entry for each file that kvferry has written into the cache. Skip files of other programs.

        Raises ConfigError if the files cannot be listed.
        """
        ...

    def opened(self, entry: CacheEntry) -> AbstractContextManager[StoredFile]:
        """Return a context manager that opens the file of an entry for reading.

        Entering the context raises FileNotFoundError if the file is gone, and another OSError if it cannot be
        opened.
        """
        ...

    def space(self) -> SpaceUsage:
        """Return the capacity of the cache, the bytes in use, and the free room on its disk."""
        ...

    def collect(self, capacity: int | None = None) -> CollectResult:
        """Evict files of the cache until at most `capacity` bytes are in use.

        Before that, remove the temporary files that dead writers left behind, and count the bytes in use
        again. Files are evicted in the order of `CacheEntry.used_ns`, the earliest first.

        Args:
            capacity: maximum bytes in use after this call. It does not change the capacity of the cache. None
                for the capacity of the cache.

        Raises:
            ConfigError: the cache cannot be read or changed, or `capacity` is None and the capacity of the
                cache is unknown.
        """
        ...

    def clear(self) -> tuple[int, int]:
        """Remove all kvferry files of the cache, and no other files.

        Returns:
            The number of removed files, and the sum of their bytes.

        Raises:
            ConfigError: the cache cannot be read or changed.
        """
        ...
