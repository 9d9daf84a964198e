"""Faults in kvferry's own threads: something raises that nobody expected, and the thread must go on."""

from __future__ import annotations

import random

from faults.kinds import kind
from faults.stage import LATE, UNANSWERED, Stage
from faults.values import Area, Trial

ENGINE = Area.ENGINE


def _declare(name: str, says: str, role: str, fault: str, why: str, families: tuple[str, ...] = ()) -> None:
    @kind(name, ENGINE, says, together=1, share=0.3, families=families)
    async def raised(stage: Stage, trial: Trial, draw: random.Random) -> None:
        await stage.decode.do("forgive")
        await stage.through(trial, stage.text(draw, 129), stage.salt(draw))  # they have met
        engine = getattr(stage, role)
        before = await engine.do("disarm", fault)
        await engine.do("arm", fault)
        text, salt = stage.text(draw, 129), stage.salt(draw)
        params = await stage.prefilled(text, salt)
        params.pop("remote_sealed_grant", None)  # without it, the load depends on the thread
        first = await stage.decoded(trial, text, params, salt)
        count = await engine.do("disarm", fault) - before
        trial.injected = f"{count} time(s): {fault}" if count else ""
        trial.detected = await stage.failed(first, why)
        await stage.rest()
        await stage.decode.do("forgive")
        second = await stage.through(trial, stage.text(draw, 129), stage.salt(draw))
        ends = [one["outcome"] for one in await stage.from_peer(second, "LoadEnded")]
        if ends != ["ready"]:
            trial.forbidden.append(f"the thread is gone: the next load ended {ends}, not ready")


_declare(
    "a reading lane raises", "An unexpected error in a thread that reads from peers.",
    "decode", "break lane", "the lane failed",
)  # fmt: skip
_declare(
    "the asking thread raises", "An unexpected error in the thread that asks peers.",
    "decode", "break client", UNANSWERED,
)  # fmt: skip
_declare(
    "the answering thread raises", "An unexpected error in the thread that answers peers.",
    "prefill", "break server", UNANSWERED,
)  # fmt: skip
_declare(
    "the gathering thread raises", "An unexpected error in the thread that gathers for peers.",
    "prefill", "break gather", LATE, ("qwen3",),
)  # fmt: skip
