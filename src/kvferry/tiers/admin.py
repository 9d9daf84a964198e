"""A cache as an operator sees it: everything of kvferry's in one place, whatever kind of place that is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kvferry.tiers.format.checksum import Buffer
from kvferry.tiers.paths import CacheEntry


@dataclass(frozen=True, slots=True)
class SpaceUsage:
    """What a place may hold. None stands for what it does not have, or what cannot be read.

    Attributes:
        capacity: bytes.
        charged: bytes that the ledger has as used: with those reserved for chunks being written.
        free: bytes free on the disk.
    """

    capacity: int | None = None
    charged: int | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True)
class CollectResult:
    """What collecting has done.

    Attributes:
        swept: leftovers of dead writers that were removed.
        evicted: chunks and quarantined files that had to go.
        evicted_bytes: of these.
        charged: bytes in use afterwards.
        capacity: bytes that it was evicted to.
    """

    swept: int
    evicted: int
    evicted_bytes: int
    charged: int
    capacity: int


class StoredFile(Protocol):
    """A file, or an object, that is being read. What is read may be damaged in any way.

    Attributes:
        size: bytes.
    """

    size: int

    def read(self, offset: int, size: int) -> Buffer:
        """`size` bytes from an offset on, or fewer where it ends. Raises OSError."""
        ...

    def quarantine(self) -> bool:
        """Move it to quarantine, if it still is what was opened; says whether it was moved."""
        ...


class CacheAdmin(Protocol):
    """One place. Engines may be using it, so what was listed may be gone.

    Attributes:
        where: the absolute path of a directory, or a URL.
        notes_use: whether files are marked when they are used; else their time is when they were stored.
        no_capacity: what it means that no capacity is known.
    """

    where: str
    notes_use: bool
    no_capacity: str

    def entries(self) -> Iterator[CacheEntry]:
        """All that is kvferry's. Raises ConfigError where it cannot be listed."""
        ...

    def opened(self, entry: CacheEntry) -> AbstractContextManager[StoredFile]:
        """Open a file for reading. Raises FileNotFoundError, or another OSError."""
        ...

    def space(self) -> SpaceUsage:
        """What it may hold."""
        ...

    def collect(self, capacity: int | None = None) -> CollectResult:
        """Remove what dead writers left, count, and evict the oldest.

        Args:
            capacity: bytes to evict to, this once; None: what it may hold.

        Raises:
            ConfigError: it cannot be used, or has no capacity that is known, and none is given.
        """
        ...

    def clear(self) -> tuple[int, int]:
        """Remove everything of kvferry's, and nothing else.

        Returns:
            How many files were removed, and their bytes.

        Raises:
            ConfigError: it cannot be used.
        """
        ...
