"""Chunks of one load on their way into host memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvferry.tiers.host.tier import Slot
from kvferry.tiers.outcome import GetOutcome


@dataclass(frozen=True, slots=True)
class Want:
    """A chunk that a load takes.

    Attributes:
        group: number of the canonical group.
        number: of the chunk in the prompt.
        key: that it is kept under.
        tokens: that it holds; 0 of a snapshot.
    """

    group: int
    number: int
    key: bytes
    tokens: int


@dataclass(slots=True)
class Fetch:
    """The chunks of one load on their way to host memory. `reading.Reading` fills it, the load empties it.

    Attributes:
        left: chunks that nobody has looked for yet.
        without: names of tiers that are not asked.
        coming: chunks that are being read, by key.
        ready: chunks that lie in host memory, held for this load until they are closed.
        tiers: names of the tiers that chunks came from.
        failed: names of tiers that could not read a chunk. One that it had no longer is no fault of a tier:
            nobody is offered that chunk again.
        failure: why it cannot go on; what is ready stays so.
        miss: of the chunk that this is for.
    """

    left: deque[Want] = field(default_factory=deque)
    without: frozenset[str] = frozenset()
    coming: dict[bytes, Want] = field(default_factory=dict)
    ready: deque[tuple[Want, Slot]] = field(default_factory=deque)
    tiers: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failure: str | None = None
    miss: GetOutcome | None = None

    @property
    def over(self) -> bool:
        """Nothing more will become ready."""
        return self.failure is not None or not (self.left or self.coming)

    def take(self) -> list[tuple[Want, Slot]]:
        """What has become ready since the last call; the caller closes the slots."""
        found = list(self.ready)
        self.ready.clear()
        return found
