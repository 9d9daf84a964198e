"""Operator commands on object storage. Engines may use it at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.common.errors import ConfigError
from kvferry.tiers.admin import CacheAdmin, CollectResult, SpaceUsage, StoredFile
from kvferry.tiers.format.chunk import Buffer
from kvferry.tiers.objects.client import BucketClient, OpenObject
from kvferry.tiers.objects.faults import Unavailable
from kvferry.tiers.paths import (
    ENCRYPTION_MARKER,
    CacheEntry,
    EntryKind,
    chunk_identity,
    entry_kind,
    quarantine_name,
)

_TIMEOUT_SECONDS = 60.0
# Maximum number of objects that one request can remove.
_REMOVED = 1000


class BucketAdmin(CacheAdmin):
    """The cache under a URL of object storage, as operator commands use it.

    It has no capacity, and no temporary files to remove, because an object appears completely or not at all.
    Raise ConfigError as `BucketClient`, or if a request failed or there is no kvferry object under the URL.
    """

    records_use = False
    no_capacity = "none: see to the bucket's lifecycle rules"

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self._bucket = BucketClient(url, options, _TIMEOUT_SECONDS)
        self.where = self._bucket.url
        if next(self.entries(), None) is None:
            raise ConfigError(
                f"{self.where} is not a cache of kvferry: no object there has the name of a chunk; "
                "give the URL of the tier"
            )

    def entries(self) -> Iterator[CacheEntry]:
        with self._as_config_error():
            for page in self._bucket.list():
                for one in page:
                    kind = entry_kind(one.path)
                    if kind is not None:
                        top, _, below = one.path.partition("/")
                        space = top if below and kind is not EntryKind.QUARANTINED else ""
                        yield CacheEntry(
                            path=f"{self.where}/{one.path}",
                            kind=kind,
                            size=one.size,
                            charged=one.size,
                            used_ns=one.stored_ns,
                            namespace=space,
                        )

    @contextmanager
    def opened(self, entry: CacheEntry) -> Iterator[StoredFile]:
        name = self._name(entry)
        found = self._bucket.get(name)
        yield _OpenObject(self._bucket, name, found, found.size)

    def space(self) -> SpaceUsage:
        return SpaceUsage()

    def collect(self, capacity: int | None = None) -> CollectResult:
        if capacity is None:
            raise ConfigError(
                f"{self.where} is object storage, which has no capacity of its own; give one with --capacity"
            )
        entries = list(self.entries())
        charged = sum(entry.charged for entry in entries)
        evicted = []
        # By the time of storing, because object storage does not record uses.
        for entry in sorted(entries, key=lambda one: one.used_ns):
            if charged <= capacity:
                break
            if entry.kind in (EntryKind.CHUNK, EntryKind.QUARANTINED):
                evicted.append(entry)
                charged -= entry.charged
        self._remove(evicted)
        return CollectResult(0, len(evicted), sum(one.charged for one in evicted), charged, capacity)

    def clear(self) -> tuple[int, int]:
        entries = list(self.entries())
        # Remove the notes last, and the marker after them. If the command is interrupted, they still describe
        # the remaining chunks.
        marker = f"{self.where}/{ENCRYPTION_MARKER}"
        self._remove(sorted(entries, key=lambda one: (one.kind is EntryKind.NOTE, one.path == marker)))
        return len(entries), sum(one.charged for one in entries)

    def _remove(self, entries: Sequence[CacheEntry]) -> None:
        names = [self._name(entry) for entry in entries]
        with self._as_config_error():
            for at in range(0, len(names), _REMOVED):
                self._bucket.remove(names[at : at + _REMOVED])

    def _name(self, entry: CacheEntry) -> str:
        return entry.path.removeprefix(f"{self.where}/")

    @contextmanager
    def _as_config_error(self) -> Iterator[None]:
        try:
            yield
        except Unavailable as error:
            raise ConfigError(f"object tier: {self.where}: {error}; {error.fault.advice}") from error


@dataclass(frozen=True, slots=True)
class _OpenObject(StoredFile):
    bucket: BucketClient
    name: str
    found: OpenObject
    size: int

    def read(self, offset: int, size: int) -> Buffer:
        return self.found.read(offset, size)

    def quarantine(self) -> bool:
        try:
            self.bucket.move(self.name, quarantine_name(*chunk_identity(self.name)))
        except OSError:
            return False
        return True
