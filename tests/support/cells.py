"""Strided copies of one cell, drawn at random, and their runs one by one."""

from __future__ import annotations

import itertools
import random

from kvferry.planning.strided_copy import Loop, StridedCopy


def cell(draw: random.Random) -> tuple[StridedCopy, int, int]:
    """A strided copy with axes in any order and with gaps, and the bytes that it spans on each side."""
    run = draw.choice([1, 2, 4, 8, 16, 3, 24, 32, 64, 128, 256, 300, 1024])
    counts = [draw.randint(2, 19 if run < 64 else 4) for _ in range(draw.randint(0, 3))]
    sides = []
    for _ in range(2):
        strides, span = [0] * len(counts), run
        for axis in draw.sample(range(len(counts)), len(counts)):
            strides[axis] = span = span + draw.choice([0, 0, 8, 13])
            span *= counts[axis]
        sides.append((strides, span))
    (src, src_span), (dst, dst_span) = sides
    loops = sorted(map(Loop, counts, src, dst), key=lambda loop: -loop.dst)
    return StridedCopy(0, draw.randint(0, 40), run, tuple(loops)), src_span, dst_span + 40


def runs(copy: StridedCopy) -> list[tuple[int, int]]:
    """The offsets of all runs at the source and at the destination, loop by loop."""
    steps = itertools.product(*(range(loop.count) for loop in copy.loops))
    return [
        (
            copy.src + sum(i * loop.src for i, loop in zip(step, copy.loops, strict=True)),
            copy.dst + sum(i * loop.dst for i, loop in zip(step, copy.loops, strict=True)),
        )
        for step in steps
    ]
