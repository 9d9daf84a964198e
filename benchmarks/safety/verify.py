"""Measure the cost of verifying what is read from peers.

The same request is read by two ranks, one of which compares digests of its blocks with the producer's. Both
sides share the cores and the memory of this machine, which engines on two machines would not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import patch

from benchmarks.safety.cost import ProtectionCost, SafetyJob
from kvferry.tools.bench.movers import KVFerryMover
from kvferry.tools.measuring.producer_process import ProducerProcess, use_transports
from kvferry.tools.measuring.reader import Reader
from kvferry.tools.measuring.rounds import run_rounds
from kvferry.tools.measuring.simulated import simulate_engine
from kvferry.tools.plan.side import EngineSide
from kvferry.transport.costs import TransferSettings

TARGET = 0.03
"""Largest allowed share of a transfer's time."""

_PART = "verify"

# By name of the pair: the prefill engine, the decode engine, and `UCX_TLS`, None to let UCX choose.
_PAIRS = {
    "alike": (EngineSide(), EngineSide(), None),
    "from TP2, other blocks and layout": (
        EngineSide(tp=2, block_tokens=32),
        EngineSide(block_tokens=16, layout="LBHNC"),
        None,
    ),
    "alike, over TCP": (EngineSide(), EngineSide(), "tcp,self"),
}


def measure(job: SafetyJob, progress: Callable[[str], None]) -> list[ProtectionCost]:
    """Measure whole transfers between two processes, verified and not, and return the costs.

    Args:
        job: settings of the benchmark.
        progress: function that is called with a line of text before each round.
    """
    return [_measure(job, name, *pair, progress) for name, pair in _PAIRS.items()]


def _measure(
    job: SafetyJob,
    name: str,
    prefill: EngineSide,
    decode: EngineSide,
    transports: str | None,
    progress: Callable[[str], None],
) -> ProtectionCost:
    source, *destinations = (
        simulate_engine(role, job.reading, side, job.tokens, seed=seed)
        for seed, (role, side) in enumerate(
            (("source", prefill), ("verified", decode), ("unverified", decode)), 1
        )
    )
    settings = TransferSettings(verify=True), TransferSettings()
    with (
        patch.dict(os.environ),  # the next measurement has transports of its own
        ProducerProcess([source], use_transports(transports)) as producer,
        Reader(destinations[0], producer, settings=settings[0]) as verified,
        Reader(destinations[1], producer, settings=settings[1]) as unverified,
    ):
        movers = KVFerryMover("with", verified, source), KVFerryMover("without", unverified, source)
        on, off = run_rounds([mover.move for mover in movers], job.repeats, progress)
        for reader in (verified, unverified):
            reader.check()
    work = f"transfer of {job.tokens:,} tokens, {name}"
    return ProtectionCost(part=_PART, work=work, on=tuple(on), off=tuple(off), target=TARGET)
