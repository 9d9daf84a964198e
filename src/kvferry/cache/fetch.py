"""The chunks of one load on their way into host memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvferry.tiers.host.tier import Slot
from kvferry.tiers.outcome import GetOutcome


@dataclass(frozen=True, slots=True)
class WantedChunk:
    """A chunk that a load needs.

    Attributes:
        group: index of the KV cache group.
        number: index of the chunk in the prompt; 0 for the chunk that starts at the first token.
        key: key of the chunk in this group.
        tokens: number of tokens in the chunk; 0 for a snapshot (recurrent state at one position).
    """

    group: int
    number: int
    key: bytes
    tokens: int


@dataclass(slots=True)
class Fetch:
    """The chunks of one load on their way from the tiers to host memory.

    `reading.Reading` moves each chunk from `remaining` to `reading` if a slow tier must be read, and then to
    `ready`. The load takes ready chunks with `take`.

    Attributes:
        remaining: chunks that are neither held (kept in host memory for this load) nor being read.
        without: names of tiers that the load must not read from.
        reading: chunks that are being read, by key.
        ready: chunks in host memory, each with its slot (memory of one chunk). The chunk is not evicted until
            the load closes the slot.
        tiers: names of the tiers, host memory included, that have provided chunks of this load so far.
        failed: names of the tiers in which a read for this load had an I/O error. A tier that merely no
            longer has a chunk is not included.
        failure: reason why the fetch cannot continue; None if it can. Chunks in `ready` stay ready.
        miss: outcome for the chunk that caused the failure, e.g. ABSENT if no tier has it any more; None if
            there is no failure, or if the fetch failed because the cache was reset.
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
        """True if the load has no chunk left to wait for.

        All chunks are ready or were taken, or the fetch has failed or was cancelled.
        """
        return self.failure is not None or not (self.remaining or self.reading)

    def take(self) -> list[tuple[WantedChunk, Slot]]:
        """Remove all ready chunks, and return each with its slot (memory of one chunk in host memory).

        The caller must close the slots.
        """
        found = list(self.ready)
        self.ready.clear()
        return found
