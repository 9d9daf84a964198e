"""The chunks of one load on their way into host memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvferry.tiers.host.tier import Slot
from kvferry.tiers.outcome import GetOutcome


@dataclass(frozen=True, slots=True)
class WantedChunk:
    """A chunk that a load needs."""

    group: int  # index of the KV cache group
    number: int  # index of the chunk in the prompt
    key: bytes  # key of the chunk in this group
    tokens: int  # number of tokens in the chunk; 0 for a snapshot


@dataclass(slots=True)
class Fetch:
    """The chunks of one load on their way from the tiers to host memory.

    `reading.Reading` moves each chunk from `remaining` to `reading` if a slow tier must be read, and then to
    `ready`. The load takes ready chunks with `take`.
    """

    # Chunks that are neither held nor being read.
    remaining: deque[WantedChunk] = field(default_factory=deque)
    without: frozenset[str] = frozenset()  # names of tiers that the load must not read from
    reading: dict[bytes, WantedChunk] = field(default_factory=dict)  # chunks that are being read, by key
    # Chunks in host memory, held until the load closes the slot.
    ready: deque[tuple[WantedChunk, Slot]] = field(default_factory=deque)
    # Names of the tiers, host memory included, that have provided chunks of this load so far.
    tiers: set[str] = field(default_factory=set)
    # Names of the tiers in which a read for this load had an I/O error. A tier that merely no longer has a
    # chunk is not included.
    failed: set[str] = field(default_factory=set)
    # Reason why the fetch cannot continue; None if it can. Chunks in `ready` stay ready.
    failure: str | None = None
    # Outcome for the chunk that caused the failure, such as ABSENT if no tier has it any more; None if there
    # is no failure, or if the cache was reset.
    miss: GetOutcome | None = None

    @property
    def over(self) -> bool:
        """Whether the load has no chunk left to wait for: all are ready or taken, or it has failed."""
        return self.failure is not None or not (self.remaining or self.reading)

    def take(self) -> list[tuple[WantedChunk, Slot]]:
        """Remove and return all ready chunks. The caller must close the slots."""
        found = list(self.ready)
        self.ready.clear()
        return found
