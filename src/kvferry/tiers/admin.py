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
    """The space that a cache uses, in bytes. A value is None if it is unknown.

    Attributes:
        capacity: maximum bytes of all files together.
        charged: bytes in use, as recorded by the cache; includes space reserved for chunks being written.
        free: free bytes on the disk.
    """

    capacity: int | None = None
    charged: int | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True)
class CollectResult:
    """The result of `CacheAdmin.collect`, which evicts files until a cache fits into a capacity.

    Attributes:
        swept: number of temporary files that were removed because their writers are dead.
        evicted: number of evicted files: chunks, and bad chunks in quarantine.
        evicted_bytes: bytes of the evicted files.
        charged: bytes in use after the eviction.
        capacity: limit in bytes that the cache was reduced to.
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

        If another file has replaced this file in the meantime, the other file is not moved.
        """
        ...


class CacheAdmin(Protocol):
    """A cache: all kvferry files in a directory or under a URL. Operator commands use this protocol.

    Engines may use the cache at the same time, so a file that was listed may be gone.

    Attributes:
        where: absolute path of the directory, or URL.
        records_use: whether the cache records when a file was last used. If False, the time in an entry
            (`CacheEntry.used_ns`) is the time of storing.
        no_capacity: text that explains to the operator why the capacity is unknown.
    """

    where: str
    records_use: bool
    no_capacity: str

    def entries(self) -> Iterator[CacheEntry]:
        """Yield an entry for each file in the cache that kvferry has written.

        Raises ConfigError if the files cannot be listed.
        """
        ...

    def opened(self, entry: CacheEntry) -> AbstractContextManager[StoredFile]:
        """Return a context manager that opens a file of the cache for reading.

        Entering the context raises FileNotFoundError if the file is gone, or another OSError.
        """
        ...

    def space(self) -> SpaceUsage:
        """Return the capacity of the cache, the bytes in use, and the free bytes on its disk."""
        ...

    def collect(self, capacity: int | None = None) -> CollectResult:
        """Reduce the cache to a limit: evict files until at most `capacity` bytes are in use.

        First, temporary files of dead writers are removed, and the bytes in use are counted again. Then the
        files with the earliest `CacheEntry.used_ns` are evicted.

        Args:
            capacity: limit in bytes, for this call only; None for the capacity of the cache.

        Raises:
            ConfigError: the cache cannot be used, or its capacity is unknown and none is given.
        """
        ...

    def clear(self) -> tuple[int, int]:
        """Remove all kvferry files of the cache, and no other files.

        Returns:
            The number of removed files, and the sum of their bytes.

        Raises:
            ConfigError: the cache cannot be used.
        """
        ...
