"""Results as `kvferry bench` measures them, made of given times."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvferry.planning.strategy import Costs
from kvferry.tools.bench.rounds import MoverRounds, TierSpeed
from kvferry.tools.bench.tiers import MeasuredTiers, TiersJob
from kvferry.tools.bench.transfer import MeasuredTransfer, TransferComparison, TransferJob
from kvferry.tools.measuring.calibrate import CalibrationResult, Fit
from kvferry.tools.measuring.rounds import MachineFacts, Spread
from kvferry.tools.measuring.simulated import read_geometry
from kvferry.tools.plan.side import EngineSide

BYTES = 512 << 20
_PROCESSOR = "Some Long-named Processor 9654P 96-Core @ 3.70GHz"


def transfer(ferry_seconds: tuple[float, ...]) -> MeasuredTransfer:
    """Return a transfer compared with movers that take a tenth of a second.

    Args:
        ferry_seconds: times of kvferry's three rounds.
    """
    raw = tuple(
        MoverRounds(name, BYTES, (0.1, 0.1, 0.1))
        for name in ("(a) raw NIXL, 2 MiB descriptors", "(b) raw NIXL, same descriptors", "(c) memcpy")
    )
    return MeasuredTransfer(
        job=TransferJob(
            reading=read_geometry("Llama-3.1-8B"),
            side=EngineSide(),
            tokens=4096,
            order="scattered",
            repeats=9,
        ),
        blocks=256,
        layers=32,
        page_bytes=64 << 10,
        machine=MachineFacts(128, _PROCESSOR, "rc,cuda_copy,cuda_ipc,sm,self"),
        comparison=TransferComparison(
            MoverRounds("kvferry", BYTES, ferry_seconds), raw, (1e-3, 0.1, 1e-3, 1e-3)
        ),
    )


def tier_speed(ours: float, depth: int = 1, target: float = 0.8, tier: str = "host, LBNHC") -> TierSpeed:
    """Return a speed compared with limits that take 0.1 and 0.2 seconds.

    Args:
        ours: time of each of kvferry's rounds, in seconds.
        depth: number of chunks in flight.
        target: wanted share of the limit.
        tier: name of the tier.
    """
    slow, fast = (
        MoverRounds(name, BYTES, (s,) * 3) for name, s in (("threads, O_DIRECT", 0.2), ("fio", 0.1))
    )
    control = MoverRounds("memcpy in runs of 8 KiB", BYTES, (0.16,) * 3)
    return TierSpeed(
        tier=tier,
        direction="store",
        depth=depth,
        target=target,
        ours=MoverRounds("kvferry", BYTES, (ours,) * 3),
        limits=(slow, fast),
        controls=(control,),
    )


def tiers(*speeds: TierSpeed) -> MeasuredTiers:
    """Return a result with these speeds."""
    return MeasuredTiers(
        job=TiersJob(
            reading=read_geometry("Llama-3.1-8B"),
            sides=(EngineSide(layout="LBNHC"),),
            depths=(1, 8),
            repeats=7,
            path=Path("/tmp"),
        ),
        machine=MachineFacts(128, _PROCESSOR, None),
        chunk_tokens=256,
        chunk_bytes=16 << 20,
        speeds=speeds,
    )


def calibration(costs: Costs) -> CalibrationResult:
    """Return a calibration with these costs."""
    fitted = Fit(np.ones(2), np.array([0.03, 0.13]))
    return CalibrationResult(costs=costs, reads=fitted, copies=fitted, ask=Spread(3e-4, 2e-4, 4e-4))
