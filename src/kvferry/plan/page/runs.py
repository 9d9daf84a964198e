"""Which bytes of the strips on one side go to which on the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.plan.page.strips import Strip
from kvferry.planning.pieces import Pieces
from kvferry.planning.template import Route


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that travel together.

    Attributes:
        src, dst: addresses of the first byte.
        src_span, dst_span: bytes from the first to after the last, gaps included.
        bytes: that travel.
        pieces: contiguous runs; 1 for a single one.
    """

    src: int
    dst: int
    src_span: int
    dst_span: int
    bytes: int
    pieces: int = 1


def runs_of(route: Route, dst_blocks: int, src_blocks: int) -> Iterator[Run]:
    """Every run of a route into its first blocks at the destination, out of the first at the source."""
    cells = max(min(dst_blocks * route.dst_cells, src_blocks * route.src_cells), 1)
    for cell in range(cells):
        pieces: Pieces = route.phases[cell % len(route.phases)]
        src = cell // route.src_cells * route.src_stride
        dst = cell // route.dst_cells * route.dst_stride
        rows = zip(pieces.src.tolist(), pieces.dst.tolist(), pieces.length.tolist(), strict=True)
        for a, b, length in rows:
            yield Run(a + src, b + dst, length, length, length)


def by_strip(runs: Sequence[Run], src: Sequence[Strip], dst: Sequence[Strip]) -> list[Run]:
    """Runs between the same two strips as one; a run over several strips is cut at their borders.

    Args:
        runs: what travels.
        src, dst: strips of both sides, by address. What touches none of them is left out.
    """
    joined: dict[tuple[int, int], Run] = {}
    starts = ([strip.address for strip in src], [strip.address for strip in dst])
    for run in runs:
        for a, b, piece in _cut(run, src, dst, starts):
            before = joined.get((a, b))
            joined[a, b] = piece if before is None else _both(before, piece)
    return list(joined.values())


def _cut(
    run: Run, src: Sequence[Strip], dst: Sequence[Strip], starts: tuple[list[int], list[int]]
) -> Iterator[tuple[int, int, Run]]:
    at = 0
    while at < run.bytes:
        a, b = bisect_right(starts[0], run.src + at) - 1, bisect_right(starts[1], run.dst + at) - 1
        room = min(_room(src, a, run.src + at), _room(dst, b, run.dst + at), run.bytes - at)
        if room <= 0:
            return
        yield a, b, Run(run.src + at, run.dst + at, room, room, room)
        at += room


def _room(strips: Sequence[Strip], number: int, address: int) -> int:
    """Bytes from `address` to the end of that strip; not above 0 outside of it."""
    return strips[number].stop - address if number >= 0 else 0


def _both(one: Run, other: Run) -> Run:
    src, dst = min(one.src, other.src), min(one.dst, other.dst)
    return Run(
        src,
        dst,
        max(one.src + one.src_span, other.src + other.src_span) - src,
        max(one.dst + one.dst_span, other.dst + other.dst_span) - dst,
        one.bytes + other.bytes,
        one.pieces + other.pieces,
    )
