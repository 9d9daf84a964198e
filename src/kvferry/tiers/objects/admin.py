"""Object storage, as an operator sees it and sees to it while engines may be using it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.tiers.admin import Cache, Collected, Opened, Space
from kvferry.tiers.format.checksum import Buffer
from kvferry.tiers.objects.client import Bucket
from kvferry.tiers.objects.faults import Unavailable
from kvferry.tiers.objects.stream import Stream
from kvferry.tiers.paths import Entry, Kind, identity, kind_of, quarantine_name

_TIMEOUT_SECONDS = 60.0
# As many as one request removes.
_REMOVED = 1000


class ObjectCache(Cache):
    """What lies under a URL of the object tier.

    It has no capacity of its own, and no leftovers: an object that was not stored whole is not there.

    Args:
        url: as the tier's.
        options: of the client, as the tier's.

    Raises:
        ConfigError: URL or options cannot be used, it cannot be reached, or nothing there is kvferry's.
    """

    notes_use = False
    no_capacity = "none: see to the bucket's lifecycle rules"

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self._bucket = Bucket(url, options, _TIMEOUT_SECONDS)
        self.where = self._bucket.url
        if next(self.entries(), None) is None:
            raise ConfigError(
                f"{self.where} is no cache of kvferry: nothing there has the name of a chunk; "
                "give the URL that the tier has"
            )

    def entries(self) -> Iterator[Entry]:
        """All objects of the tier; see `Cache.entries`."""
        with self._told():
            for page in self._bucket.list():
                for one in page:
                    kind = kind_of(one.path)
                    if kind is not None:
                        space = one.path.partition("/")[0] if kind is not Kind.QUARANTINED else ""
                        yield Entry(
                            f"{self.where}/{one.path}",
                            kind,
                            one.size,
                            one.size,
                            one.stored_ns,
                            namespace=space,
                        )

    @contextmanager
    def opened(self, entry: Entry) -> Iterator[Opened]:
        """Begin to read an object; see `Cache.opened`."""
        name = self._name(entry)
        found = self._bucket.get(name)
        yield _Object(self._bucket, name, Stream(found.pieces), found.size)

    def space(self) -> Space:
        """Nothing that is known."""
        return Space()

    def collect(self, capacity: int | None = None) -> Collected:
        """Remove what was stored longest ago."""
        if capacity is None:
            raise ConfigError(
                f"{self.where} has no capacity of its own, as object storage has none; give one"
            )
        entries = list(self.entries())
        charged = sum(entry.charged for entry in entries)
        evicted = []
        for entry in sorted(entries, key=lambda one: one.used_ns):
            if charged <= capacity:
                break
            if entry.kind in (Kind.CHUNK, Kind.QUARANTINED):
                evicted.append(entry)
                charged -= entry.charged
        self._remove(evicted)
        return Collected(0, len(evicted), sum(one.charged for one in evicted), charged, capacity)

    def clear(self) -> tuple[int, int]:
        """Remove everything of kvferry's; other objects stay."""
        entries = list(self.entries())
        # The notes last: who is interrupted here can see whose the rest is.
        self._remove(sorted(entries, key=lambda one: one.kind is Kind.NOTE))
        return len(entries), sum(one.charged for one in entries)

    def _remove(self, entries: Sequence[Entry]) -> None:
        names = [self._name(entry) for entry in entries]
        with self._told():
            for at in range(0, len(names), _REMOVED):
                self._bucket.remove(names[at : at + _REMOVED])

    def _name(self, entry: Entry) -> str:
        return entry.path.removeprefix(f"{self.where}/")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say to an operator what a request came to."""
        try:
            yield
        except Unavailable as error:
            raise ConfigError(f"object tier: {self.where}: {error}; {error.fault.advice}") from error


@dataclass(frozen=True, slots=True)
class _Object(Opened):
    """An object that is being read.

    Attributes:
        bucket: where it is.
        name: its name there.
        stream: its bytes.
        size: bytes.
    """

    bucket: Bucket
    name: str
    stream: Stream
    size: int

    def read(self, offset: int, size: int) -> Buffer:
        return self.stream.read(offset, size)

    def set_aside(self) -> bool:
        try:
            self.bucket.move(self.name, quarantine_name(*identity(self.name)))
        except OSError:
            return False
        return True
