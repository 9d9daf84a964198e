"""The protocol of a cache for operator commands: all kvferry files in one directory or under one URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kvferry.tiers.format.checksum import Buffer
from kvferry.tiers.paths import CacheEntry


@dataclass(frozen=True, slots=True)
class SpaceUsage:
    """The space of a cache. None marks a number that does not exist or cannot be read.

    Attributes:
        capacity: maximum bytes of all files.
        charged: bytes that the ledger counts as used, including those reserved for chunks being written.
        free: free bytes on the disk.
    """

    capacity: int | None = None
    charged: int | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True)
class CollectResult:
    """The result of `CacheAdmin.collect`.

    Attributes:
        swept: number of removed leftovers of dead writers.
        evicted: number of evicted chunks and quarantined files.
        evicted_bytes: bytes of the evicted files.
        charged: bytes in use afterwards.
        capacity: bytes that the cache was evicted to.
    """

    swept: int
    evicted: int
    evicted_bytes: int
    charged: int
    capacity: int


class StoredFile(Protocol):
    """A file or object that is being read. Its content may be damaged in any way.

    Attributes:
        size: bytes of the file.
    """

    size: int

    def read(self, offset: int, size: int) -> Buffer:
        """Return `size` bytes from `offset` on, or fewer at the end of the file. Raises OSError."""
        ...

    def quarantine(self) -> bool:
        """Move the file to quarantine unless another one replaced it; return whether it was moved."""
        ...


class CacheAdmin(Protocol):
    """One cache. Engines may use it at the same time, so listed files may be gone.

    Attributes:
        where: absolute path of a directory, or a URL.
        records_use: whether the time of a file is its last use; otherwise it is the time of storing.
        no_capacity: meaning of an unknown capacity, for messages.
    """

    where: str
    records_use: bool
    no_capacity: str

    def entries(self) -> Iterator[CacheEntry]:
        """Yield all kvferry files. Raises ConfigError if they cannot be listed."""
        ...

    def opened(self, entry: CacheEntry) -> AbstractContextManager[StoredFile]:
        """Open a file for reading. Raises FileNotFoundError, or another OSError."""
        ...

    def space(self) -> SpaceUsage:
        """Return the capacity, the bytes in use and the free bytes."""
        ...

    def collect(self, capacity: int | None = None) -> CollectResult:
        """Remove leftovers of dead writers, count all files again, and evict the oldest.

        Args:
            capacity: bytes to evict to, this once; None for the capacity of the cache.

        Raises:
            ConfigError: the cache cannot be used, or its capacity is unknown and none is given.
        """
        ...

    def clear(self) -> tuple[int, int]:
        """Remove all kvferry files and no others.

        Returns:
            The number of removed files, and their bytes.

        Raises:
            ConfigError: the cache cannot be used.
        """
        ...
