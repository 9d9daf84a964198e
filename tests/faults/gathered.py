"""Faults of reads that the producer's worker gathers for: messages lost, copies slow, images reused."""

from __future__ import annotations

import random

from faults.kinds import kind
from faults.stage import DEADLINE, LATE, Stage
from faults.values import Area, Trial

TRANSFER = Area.TRANSFER
STAGED = ("qwen3",)
"""Families whose consumers ask for staged reads."""


async def _gathered(stage: Stage, trial: Trial, draw: random.Random, fault: str, times: int) -> str:
    """One request through both engines while the producer's gather channel fails; its name."""
    text, salt = stage.text(draw, 129), stage.salt(draw)
    before = await stage.prefill.do("disarm", fault)
    await stage.prefill.do("arm", fault, "", times)
    name = await stage.through(trial, text, salt)
    count = await stage.prefill.do("disarm", fault) - before
    trial.injected = f"{count} time(s): {fault}" if count else ""
    return name


def _declare(name: str, says: str, fault: str, times: int, why: str = LATE, **more: object) -> None:
    @kind(name, TRANSFER, says, together=1, share=0.3, families=STAGED, **more)
    async def gathered(stage: Stage, trial: Trial, draw: random.Random) -> None:
        request = await _gathered(stage, trial, draw, fault, times)
        trial.detected = await stage.failed(request, why)
        await stage.rest()
        await stage.decode.do("forgive")
        await stage.through(trial, stage.text(draw, 129), stage.salt(draw))


_declare("request to gather lost", "The consumer's requests to gather are lost.", "lose gather", 1 << 10)
_declare(
    "gathered answer lost", "The producer's answers that it has gathered are lost.", "lose gathered", 1 << 10
)
_declare(
    "gathering is slow",
    f"The producer's worker takes longer than {DEADLINE:g} s to gather.",
    "slow gather",
    1,
)
_declare(
    "gathered images reused",
    "The producer gives gathered images to others before they are read.",
    "reuse images", 1 << 10, "its staging area for others", protections=("image words",),
)  # fmt: skip
