"""Preparation for a peer with other block sizes, for hybrid models.

vLLM derives the block size of a hybrid from the size of its state, which depends on parallelism. Like
`planning` this runs at made-up addresses, through the code that a lane runs at the handshake. NIXL's own
preparation of the lists is left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.overhead.planning import PlannedPeer
from kvferry.measuring.simulated import read_geometry, simulate_engine
from kvferry.measuring.spread import Spread
from kvferry.plan.side import EngineSide, layout_of

PAIRS = (
    ("Kimi-K3", 1, 2),
    ("Kimi-K3", 2, 1),
    ("Nemotron-3-Nano-30B-A3B", 2, 4),
    ("Nemotron-3-Nano-30B-A3B", 4, 2),
)
"""Model, tensor-parallel ranks of the source and of the destination."""

TOKENS = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Preparation for one peer.

    Attributes:
        model: name of the model.
        parallel: tensor-parallel ranks of source and destination.
        blocks: block sizes of both, in tokens.
        descriptors: number of descriptors on both sides, for pools of `TOKENS` tokens.
        seconds: time until the lists can be given to NIXL.
    """

    model: str
    parallel: tuple[int, int]
    blocks: tuple[int, int]
    descriptors: int
    seconds: Spread


def measure(repeats: int) -> tuple[Readiness, ...]:
    """Prepare for each pair of `PAIRS`, `repeats` times after a round that does not count."""
    return tuple(_readiness(name, (src, dst), repeats) for name, src, dst in PAIRS)


def _readiness(name: str, parallel: tuple[int, int], repeats: int) -> Readiness:
    reading = read_geometry(name)
    layout = layout_of("auto", reading)
    src, dst = (
        simulate_engine(side, reading, EngineSide(tp, layout=layout), TOKENS)
        for side, tp in zip(("source", "destination"), parallel, strict=True)
    )
    seconds, descriptors = [], 0
    for _ in range(repeats + 1):
        started = time.perf_counter()
        paper = PlannedPeer(src, dst, 0)
        seconds.append(time.perf_counter() - started)
        descriptors = paper.descriptors
        paper.close()
    blocks = src.shape.block_tokens, dst.shape.block_tokens
    return Readiness(
        model=reading.cache.name,
        parallel=parallel,
        blocks=blocks,
        descriptors=descriptors,
        seconds=Spread.of(seconds[1:]),
    )
