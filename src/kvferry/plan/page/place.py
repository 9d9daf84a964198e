"""Where memory is drawn: addresses to positions along a line.

Memory that touches is drawn touching; what belongs to others in between is skipped with a small gap. All
ranks of a side stand in one row at one scale, so lengths can be compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvferry.plan.page.strips import Strip

WIDTH = 1000.0
_GAP = 5.0
_BETWEEN_RANKS = 18.0
_MOST_GAPS = WIDTH / 3


@dataclass(frozen=True, slots=True)
class MemoryLane:
    """One rank's memory.

    Attributes:
        label: which rank.
        strips: by address.
    """

    label: str
    strips: tuple[Strip, ...]


@dataclass(frozen=True, slots=True)
class DrawnLane:
    """A lane, drawn.

    Attributes:
        lane: what.
        addresses: of its strips.
        starts: where each begins.
        per_byte: width of a byte.
    """

    lane: MemoryLane
    addresses: tuple[int, ...]
    starts: tuple[float, ...]
    per_byte: float

    def at(self, address: int) -> float:
        """Where an address is drawn."""
        number = max(bisect_right(self.addresses, address) - 1, 0)
        inside = min(address - self.addresses[number], self.lane.strips[number].length)
        return self.starts[number] + inside * self.per_byte

    def interval(self, address: int, length: int) -> tuple[float, float]:
        """Where a stretch is drawn, from and to."""
        return self.at(address), self.at(address + length - 1) + self.per_byte


def place(lanes: Sequence[MemoryLane]) -> list[DrawnLane]:
    """All lanes of one side, side by side."""
    total = sum(strip.length for lane in lanes for strip in lane.strips) or 1
    breaks = sum(_breaks(lane) for lane in lanes)
    gap = min(_GAP, _MOST_GAPS / breaks) if breaks else 0.0
    between = _BETWEEN_RANKS * max(len(lanes) - 1, 0)
    per_byte = (WIDTH - gap * breaks - between) / total
    x, placed = 0.0, []
    for lane in lanes:
        starts = []
        for number, strip in enumerate(lane.strips):
            if number and lane.strips[number - 1].stop != strip.address:
                x += gap
            starts.append(x)
            x += strip.length * per_byte
        placed.append(DrawnLane(lane, tuple(s.address for s in lane.strips), tuple(starts), per_byte))
        x += _BETWEEN_RANKS
    return placed


def _breaks(lane: MemoryLane) -> int:
    """How often memory is skipped."""
    return sum(before.stop != after.address for before, after in pairwise(lane.strips))
