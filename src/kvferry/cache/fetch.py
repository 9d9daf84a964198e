"""Chunks of one load on their way into host memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvferry.tiers.host.tier import Slot
from kvferry.tiers.outcome import GetOutcome


@dataclass(frozen=True, slots=True)
class WantedChunk:
    """A chunk that a load takes.

    Attributes:
        group: number of the canonical group.
        number: index of the chunk in the prompt.
        key: key of the chunk, with its group.
        tokens: number of tokens that it holds; 0 for a snapshot.
    """

    group: int
    number: int
    key: bytes
    tokens: int


@dataclass(slots=True)
class Fetch:
    """The chunks of one load on their way to host memory. `reading.Reading` fills it, the load empties it.

    Attributes:
        remaining: chunks that are not yet held or being read.
        without: names of tiers to leave out.
        reading: chunks that are being read, by key.
        ready: chunks that lie in host memory, held for this load until they are closed.
        tiers: names of the tiers that chunks came from.
        failed: names of tiers that could not read a chunk. A tier that no longer has a chunk has not failed:
            that chunk is not offered again.
        failure: reason why the fetch cannot continue; ready chunks stay ready.
        miss: outcome of the chunk that caused the failure.
    """

    remaining: deque[WantedChunk] = field(default_factory=deque)
    without: frozenset[str] = frozenset()
    reading: dict[bytes, WantedChunk] = field(default_factory=dict)
    ready: deque[tuple[WantedChunk, Slot]] = field(default_factory=deque)
    tiers: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failure: str | None = None
    miss: GetOutcome | None = None

    @property
    def over(self) -> bool:
        """Return whether no further chunk will become ready."""
        return self.failure is not None or not (self.remaining or self.reading)

    def take(self) -> list[tuple[WantedChunk, Slot]]:
        """Return the chunks that became ready since the last call; the caller closes their slots."""
        found = list(self.ready)
        self.ready.clear()
        return found
