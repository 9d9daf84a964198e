"""Digests of units in an arena: made by who wrote them, compared by who is about to use them.

The digest function is an argument: ``digest(data, unit_bytes)`` gives the digests of the units in `data`, one
after another. Host and file tier use the same one, so what moves between them carries its digests along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry.tiers.arena import Arena
from kvferry.tiers.shape import ChunkShape

Digest = Callable[[memoryview, int], bytes]


def digests_of(arena: Arena, offset: int, shape: ChunkShape, first: int, units: int, digest: Digest) -> bytes:
    """Digests of `units` units from `first` on, of the chunk at `offset`, one after another."""
    return b"".join(digest(data, size) for data, size in _runs(arena, offset, shape, first, units))


def intact(
    arena: Arena, offset: int, shape: ChunkShape, first: int, units: int, digest: Digest, expected: bytes
) -> bool:
    """Whether these units are what was written.

    Args:
        arena, offset, shape, first, units, digest: as of `digests_of`.
        expected: digests of all units of the chunk, as the book has them.
    """
    each = len(expected) // shape.total_units
    return (
        digests_of(arena, offset, shape, first, units, digest)
        == expected[first * each : (first + units) * each]
    )


def _runs(
    arena: Arena, offset: int, shape: ChunkShape, first: int, units: int
) -> Iterator[tuple[memoryview, int]]:
    """The units, with their size, as one piece of memory per section."""
    end = first + units
    while first < end:
        section = shape.section(first)
        size = shape.unit_bytes[section]
        until = min(end, shape.firsts[section] + shape.units[section])
        yield arena.bytes_at(offset + shape.at(first), (until - first) * size), size
        first = until
