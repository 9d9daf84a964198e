"""What one chunk of a group takes in host memory: its sections, one after another, each from a page on.

>>> shape = ChunkShape(units=(8, 1), unit_bytes=(1000, 6))
>>> shape.offsets, shape.stride, shape.total_units
((0, 8192), 12288, 9)
>>> shape.at(1), shape.at(8)
(1000, 8192)
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from itertools import accumulate

from kvferry.errors import ConfigError

ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Sizes of one group's chunks; all chunks of a group have the same.

    Units are numbered through all sections. A rank fills or reads runs of them.

    Attributes:
        units: of each section.
        unit_bytes: bytes of one unit of each section.
        offsets: bytes from the start of the chunk to each section.
        firsts: number of the first unit of each section.
        total_units: of all sections.
        content_bytes: of all units.
        stride: bytes from one chunk to the next, whole pages.

    Raises:
        ConfigError: there is no section, or one has no units or no bytes.
    """

    units: tuple[int, ...]
    unit_bytes: tuple[int, ...]
    offsets: tuple[int, ...] = field(init=False)
    firsts: tuple[int, ...] = field(init=False)
    total_units: int = field(init=False)
    content_bytes: int = field(init=False)
    stride: int = field(init=False)

    def __post_init__(self) -> None:
        if (
            not self.units
            or len(self.units) != len(self.unit_bytes)
            or min(*self.units, *self.unit_bytes) < 1
        ):
            raise ConfigError(
                f"a chunk of sections of {self.units} units of {self.unit_bytes} bytes; expected at least "
                "one section, and at least one unit of one byte in each"
            )
        sizes = [n * size for n, size in zip(self.units, self.unit_bytes, strict=True)]
        *offsets, stride = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
        *firsts, total = accumulate(self.units, initial=0)
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "firsts", tuple(firsts))
        object.__setattr__(self, "total_units", total)
        object.__setattr__(self, "content_bytes", sum(sizes))
        object.__setattr__(self, "stride", stride)

    def section(self, unit: int) -> int:
        """Index of the section that a unit is in."""
        return bisect.bisect_right(self.firsts, unit) - 1

    def at(self, unit: int) -> int:
        """Bytes from the start of the chunk to a unit."""
        section = self.section(unit)
        return self.offsets[section] + (unit - self.firsts[section]) * self.unit_bytes[section]
