"""Strided copies: nested loops as a compact description of many copies.

The innermost bytes, contiguous on both sides, are the *run*. A copy operation uses the loops as strided
views, a transport the `Descriptors` to which `expand_copies` expands them.

    for l in range(32):              Loop(32, 65536, 4096)
      for h in range(8):             Loop(8, 512, 65536)
        move 512 bytes               run = 512
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np

from kvferry.planning.descriptors import Descriptors, Int64s, join


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of a strided copy: its iterations, at least 2, and the bytes between them on each side."""

    count: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """A copy of runs of equal length, described by nested loops with constant strides."""

    src: int  # byte offset or address of the first run
    dst: int
    run: int  # bytes
    loops: tuple[Loop, ...] = ()  # outermost first, by descending stride at the destination

    @property
    def run_count(self) -> int:
        return prod(loop.count for loop in self.loops)

    @property
    def bytes(self) -> int:
        return self.run_count * self.run

    def at(self, src: int, dst: int) -> StridedCopy:
        """Return this copy, shifted by `src` bytes at the source and by `dst` bytes at the destination."""
        return replace(self, src=self.src + src, dst=self.dst + dst)

    def ascending(self) -> tuple[StridedCopy, ...]:
        """Return copies of the same bytes without negative strides.

        >>> StridedCopy(8, 0, 4, (Loop(2, -8, 100),)).ascending()
        (StridedCopy(src=8, dst=0, run=4, loops=()), StridedCopy(src=0, dst=100, run=4, loops=()))
        """
        # A loop with a negative stride becomes one copy per iteration: tensor views allow no such strides.
        for number, loop in enumerate(self.loops):
            if loop.src < 0 or loop.dst < 0:
                return tuple(found for part in self.unroll(number) for found in part.ascending())
        return (self,)

    def unroll(self, number: int) -> list[StridedCopy]:
        loop, rest = self.loops[number], replace(self, loops=self.loops[:number] + self.loops[number + 1 :])
        return [rest.at(i * loop.src, i * loop.dst) for i in range(loop.count)]

    def descriptors(self) -> Descriptors:
        """Return one descriptor per run. The innermost loop varies fastest."""
        src, dst = np.array([self.src], np.int64), np.array([self.dst], np.int64)
        for loop in self.loops:
            steps = np.arange(loop.count, dtype=np.int64)
            src = (src[:, None] + steps * loop.src).reshape(-1)
            dst = (dst[:, None] + steps * loop.dst).reshape(-1)
        return Descriptors(src, dst, np.full(len(src), self.run, np.int64))


def expand_copies(copies: Iterable[StridedCopy]) -> Descriptors:
    """Return the descriptors of all runs, sorted by destination. Runs contiguous on both sides are merged."""
    return join([copy.descriptors() for copy in copies])


def strided_copies(
    item_bytes: int, src: int, dst: int, axes: Sequence[tuple[Int64s, Int64s]]
) -> list[StridedCopy]:
    """Return strided copies that together copy all elements of a multi-dimensional array.

    >>> rows = np.array([0, 64]), np.array([0, 8])
    >>> columns = np.array([0, 2, 4, 6]), np.array([0, 2, 4, 6])
    >>> strided_copies(2, 100, 0, [rows, columns])
    [StridedCopy(src=100, dst=0, run=8, loops=(Loop(count=2, src=64, dst=8),))]

    Args:
        src, dst: address or byte offset to which the offsets of the axes are added, on each side.
        axes: byte offsets of the elements of each axis, per side, int64 of shape (n,).
    """
    found = [StridedCopy(src, dst, item_bytes)]
    for there, here in axes:
        parts = _describe_runs(there, here) if len(there) else []
        found = [
            StridedCopy(copy.src + part.src, copy.dst + part.dst, item_bytes, copy.loops + part.loops)
            for copy in found
            for part in parts
        ]
    return list(map(coalesce_copy, found))


def coalesce_copy(copy: StridedCopy) -> StridedCopy:
    """Return a strided copy of the same bytes with as few loops as possible."""
    run, kept = copy.run, list[Loop]()
    for loop in sorted(copy.loops, key=lambda loop: (abs(loop.dst), abs(loop.src))):
        # A loop whose stride is the run's length on both sides only makes the run longer.
        if not kept and loop.src == run and loop.dst == run:
            run *= loop.count
        # An outer loop that continues where the inner one ends, on both sides, makes the inner one longer.
        elif kept and loop.src == kept[-1].src * kept[-1].count and loop.dst == kept[-1].dst * kept[-1].count:
            kept[-1] = replace(kept[-1], count=kept[-1].count * loop.count)
        else:
            kept.append(loop)
    return StridedCopy(copy.src, copy.dst, run, tuple(reversed(kept)))


def fuse_copies(copies: Iterable[StridedCopy]) -> tuple[StridedCopy, ...]:
    """Combine equal copies at regular distances into one copy with one more loop.

    So K and V of a packed page become one copy, and so do the layers of a cross-layer cache.

    >>> fuse_copies([StridedCopy(0, 0, 8), StridedCopy(100, 8, 8), StridedCopy(200, 16, 8)])
    (StridedCopy(src=0, dst=0, run=8, loops=(Loop(count=3, src=100, dst=8),)),)
    """
    alike: dict[tuple[int, tuple[Loop, ...]], list[StridedCopy]] = defaultdict(list)
    for copy in copies:
        alike[copy.run, copy.loops].append(copy)
    found: list[StridedCopy] = []
    for (run, loops), group in alike.items():
        group.sort(key=lambda copy: copy.dst)
        starts = np.array([copy.src for copy in group]), np.array([copy.dst for copy in group])
        found += [
            coalesce_copy(StridedCopy(part.src, part.dst, run, (*part.loops, *loops)))
            for part in _describe_runs(*starts)
        ]
    # Fused copies may be equal and regularly spaced themselves: heads first, then layers.
    if len(found) < sum(map(len, alike.values())):
        return fuse_copies(found)
    return tuple(sorted(found, key=lambda copy: copy.dst))


def _describe_runs(src: Int64s, dst: Int64s) -> list[StridedCopy]:
    """Return strided copies, of 0 bytes per run, whose runs begin at these offsets, in this order."""
    progressions = _progressions(src, dst)
    if len(progressions) == len(src):
        return [StridedCopy(int(a), int(b), 0) for a, b in zip(src, dst, strict=True)]
    found: list[StridedCopy] = []
    at = 0
    while at < len(progressions):
        first, loop = progressions[at]
        stop = at + 1
        while stop < len(progressions) and progressions[stop][1] == loop:
            stop += 1
        starts = [start for start, _ in progressions[at:stop]]
        inner = (loop,) if loop else ()
        outer = (
            _describe_runs(src[starts], dst[starts])
            if len(starts) > 1
            else [StridedCopy(int(src[first]), int(dst[first]), 0)]
        )
        found += [replace(copy, loops=(*copy.loops, *inner)) for copy in outer]
        at = stop
    return found


def _progressions(src: Int64s, dst: Int64s) -> list[tuple[int, Loop | None]]:
    """Split pairs of offsets into arithmetic progressions: (first pair's index, loop; None for one pair)."""
    found: list[tuple[int, Loop | None]] = []
    steps = np.stack([np.diff(src), np.diff(dst)], 1)
    changes = np.flatnonzero((steps[1:] != steps[:-1]).any(1)) + 1
    bounds = [0, *changes.tolist(), len(steps)] if len(steps) else []
    start = 0
    for number, (low, high) in enumerate(pairwise(bounds)):
        first = max(low, start)
        longer_next = number + 2 < len(bounds) and bounds[number + 2] - high > 1
        # Two pairs always have one stride. The second is worth more as the start of a longer progression.
        if high - first == 1 and longer_next:
            found.append((first, None))
            start = high
        elif high > first:
            found.append((first, Loop(high - first + 1, int(steps[first, 0]), int(steps[first, 1]))))
            start = high + 1
    return [*found, (start, None)] if start == len(src) - 1 else found
