"""Measure the time to prepare for a peer with different block sizes, for hybrid models.

vLLM derives the block size of a hybrid model from the size of its recurrent state, which depends on the
parallel sizes. As in `planning`, addresses are invented. The code is the same that a reading thread runs at
the handshake. NIXL's own preparation of descriptor lists is not included.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.overhead.planning import PlannedPeer
from kvferry.tools.measuring.rounds import Spread
from kvferry.tools.measuring.simulated import read_geometry, simulate_engine
from kvferry.tools.plan.side import EngineSide, resolve_layout

PAIRS = (
    ("Kimi-K3", 1, 2),
    ("Kimi-K3", 2, 1),
    ("Nemotron-3-Nano-30B-A3B", 2, 4),
    ("Nemotron-3-Nano-30B-A3B", 4, 2),
)
"""Measured cases: name of the model, and tensor-parallel ranks of the source and of the destination."""

TOKENS = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """The result for one peer.

    Attributes:
        model: name of the model.
        parallel: number of tensor-parallel ranks of the source and of the destination.
        blocks: block sizes of the source and of the destination, in tokens.
        descriptors: number of descriptors for both sides, for a request of `TOKENS` tokens.
        seconds: time until the descriptor lists can be passed to NIXL, in seconds.
    """

    model: str
    parallel: tuple[int, int]
    blocks: tuple[int, int]
    descriptors: int
    seconds: Spread


def measure(repeats: int) -> tuple[Readiness, ...]:
    """Prepare for a peer in each case of `PAIRS`, and return the times.

    Args:
        repeats: number of counted rounds. Another round before them is not counted.
    """
    return tuple(_readiness(name, (src, dst), repeats) for name, src, dst in PAIRS)


def _readiness(name: str, parallel: tuple[int, int], repeats: int) -> Readiness:
    reading = read_geometry(name)
    layout = resolve_layout("auto", reading)
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
