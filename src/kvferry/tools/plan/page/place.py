"""Mapping of memory addresses to horizontal positions in a picture.

Adjacent memory is drawn without a gap. Memory of other blocks or layers is drawn as a small gap. All ranks of
a side are drawn in one row at the same scale, so that lengths can be compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvferry.tools.plan.page.strips import Strip

WIDTH = 1000.0
_GAP = 5.0
_BETWEEN_RANKS = 18.0
_MOST_GAPS = WIDTH / 3


@dataclass(frozen=True, slots=True)
class MemoryLane:
    """The memory of one rank to draw as a row in a picture: its name, and strips sorted by address."""

    label: str
    strips: tuple[Strip, ...]


@dataclass(frozen=True, slots=True)
class DrawnLane:
    """A lane with its horizontal positions in a picture, in SVG units.

    Attributes:
        addresses: memory address of the first byte of each strip.
        starts: horizontal position of the first byte of each strip.
        per_byte: width of a byte.
    """

    lane: MemoryLane
    addresses: tuple[int, ...]
    starts: tuple[float, ...]
    per_byte: float

    def at(self, address: int) -> float:
        """Return the horizontal position of an address; of the preceding strip's end if it is between two."""
        number = max(bisect_right(self.addresses, address) - 1, 0)
        inside = min(address - self.addresses[number], self.lane.strips[number].length)
        return self.starts[number] + inside * self.per_byte

    def interval(self, address: int, length: int) -> tuple[float, float]:
        """Return the horizontal positions at which a range of memory begins and ends."""
        return self.at(address), self.at(address + length - 1) + self.per_byte


def place(lanes: Sequence[MemoryLane]) -> list[DrawnLane]:
    """Place the memory of all ranks of one engine next to each other."""
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
    return sum(before.stop != after.address for before, after in pairwise(lane.strips))
