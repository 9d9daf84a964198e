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
        number: index of the chunk in the prompt, counted in whole chunks.
        key: key of the chunk in this group.
        tokens: number of tokens in the chunk; 0 for a snapshot of recurrent state.
    """

    group: int
    number: int
    key: bytes
    tokens: int


@dataclass(slots=True)
class Fetch:
    """The chunks of one load on their way to host memory.

    `reading.Reading` moves each chunk from `remaining` to `ready`, and the load takes it from there.

    Attributes:
        remaining: chunks that are neither held in host memory nor being read.
        without: names of tiers that the load must not read from.
        reading: chunks that are being read, by key.
        ready: chunks in host memory, each with the slot that is held for this load until the load closes it.
        tiers: names of the tiers that chunks have come from.
        failed: names of tiers with an I/O error in a read of this load. A tier that lacked a chunk is not
            among them, because it does not offer that chunk again.
        failure: reason why the fetch cannot continue; None if it can. Ready chunks stay ready.
        miss: outcome of the read that caused the failure; None if there is no failure or no such read.
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
        """Return whether the fetch has ended: all chunks have become ready, it failed, or was cancelled."""
        return self.failure is not None or not (self.remaining or self.reading)

    def take(self) -> list[tuple[WantedChunk, Slot]]:
        """Remove all ready chunks and return them with their slots. The caller must close the slots."""
        found = list(self.ready)
        self.ready.clear()
        return found
