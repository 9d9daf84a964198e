"""Operator commands on object storage, which engines may use at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.tiers.admin import CacheAdmin, CollectResult, SpaceUsage, StoredFile
from kvferry.tiers.format.checksum import Buffer
from kvferry.tiers.objects.client import BucketClient
from kvferry.tiers.objects.faults import Unavailable
from kvferry.tiers.objects.stream import ObjectStream
from kvferry.tiers.paths import CacheEntry, EntryKind, chunk_identity, entry_kind, quarantine_name

_TIMEOUT_SECONDS = 60.0
# As many as one request removes.
_REMOVED = 1000


class BucketAdmin(CacheAdmin):
    """The objects under a URL of the object tier.

    They have no capacity and no leftovers, since an object that was not stored completely does not exist.

    Args:
        url: URL of the tier.
        options: client settings of the tier.

    Raises:
        ConfigError: URL or options cannot be used, the store cannot be reached, or it has no kvferry objects.
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
        """Yield all objects of the tier; see `CacheAdmin.entries`."""
        with self._told():
            for page in self._bucket.list():
                for one in page:
                    kind = entry_kind(one.path)
                    if kind is not None:
                        space = one.path.partition("/")[0] if kind is not EntryKind.QUARANTINED else ""
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
        """Start to read an object; see `CacheAdmin.opened`."""
        name = self._name(entry)
        found = self._bucket.get(name)
        yield _OpenObject(self._bucket, name, ObjectStream(found.pieces), found.size)

    def space(self) -> SpaceUsage:
        """Return a usage without numbers, since none is known."""
        return SpaceUsage()

    def collect(self, capacity: int | None = None) -> CollectResult:
        """Remove the objects that were stored longest ago."""
        if capacity is None:
            raise ConfigError(
                f"{self.where} is object storage, which has no capacity of its own; give one with --capacity"
            )
        entries = list(self.entries())
        charged = sum(entry.charged for entry in entries)
        evicted = []
        for entry in sorted(entries, key=lambda one: one.used_ns):
            if charged <= capacity:
                break
            if entry.kind in (EntryKind.CHUNK, EntryKind.QUARANTINED):
                evicted.append(entry)
                charged -= entry.charged
        self._remove(evicted)
        return CollectResult(0, len(evicted), sum(one.charged for one in evicted), charged, capacity)

    def clear(self) -> tuple[int, int]:
        """Remove all kvferry objects; other objects stay."""
        entries = list(self.entries())
        # The notes last: who is interrupted here can see whose the rest is.
        self._remove(sorted(entries, key=lambda one: one.kind is EntryKind.NOTE))
        return len(entries), sum(one.charged for one in entries)

    def _remove(self, entries: Sequence[CacheEntry]) -> None:
        names = [self._name(entry) for entry in entries]
        with self._told():
            for at in range(0, len(names), _REMOVED):
                self._bucket.remove(names[at : at + _REMOVED])

    def _name(self, entry: CacheEntry) -> str:
        return entry.path.removeprefix(f"{self.where}/")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Raise an `Unavailable` as a ConfigError with advice for the operator."""
        try:
            yield
        except Unavailable as error:
            raise ConfigError(f"object tier: {self.where}: {error}; {error.fault.advice}") from error


@dataclass(frozen=True, slots=True)
class _OpenObject(StoredFile):
    """An object that is being read.

    Attributes:
        bucket: client of the bucket.
        name: name of the object in the bucket.
        stream: content of the object.
        size: bytes of the object.
    """

    bucket: BucketClient
    name: str
    stream: ObjectStream
    size: int

    def read(self, offset: int, size: int) -> Buffer:
        return self.stream.read(offset, size)

    def quarantine(self) -> bool:
        try:
            self.bucket.move(self.name, quarantine_name(*chunk_identity(self.name)))
        except OSError:
            return False
        return True
