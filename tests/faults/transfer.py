"""Faults of reads between engines: leases that end, reads that fail or are late, memory that is reused."""

from __future__ import annotations

import asyncio
import random

from faults.kinds import kind
from faults.references import LONG_TOKENS
from faults.stage import DEADLINE, LATE, OTHER_BYTES, UNKNOWN_TICKET, WORD_CHANGED, Stage
from faults.values import Area, Trial

TRANSFER = Area.TRANSFER


@kind(
    "lease ends before the read", TRANSFER,
    "The producer's lease runs out and its blocks are overwritten before the consumer reads them.",
    share=20, protections=("lease words", "raised words"),
)  # fmt: skip
async def reused(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine, theirs = stage.text(draw, 200), stage.salt(draw), stage.name(), stage.name()
    params = await stage.prefilled(text, salt, theirs)
    await stage.decode.do("arm", "hold", mine)
    answer = asyncio.create_task(stage.decoded(trial, text, params, salt, mine))
    if await stage.decode.until("holds", mine, seconds=DEADLINE):
        await stage.prefill.do("expire", theirs)
        if await stage.prefill.until("lease_is_over", theirs):
            count = await stage.prefill.do("overwrite", theirs)
            trial.injected = f"{count} blocks overwritten before the read was posted" if count else ""
    await stage.decode.do("let_go", mine)
    await answer
    await stage.decode.do("disarm", "hold", mine)
    trial.detected = await stage.failed(mine, WORD_CHANGED)


@kind(
    "sealed grant of an ended lease", TRANSFER,
    "A client sends an offer whose lease has run out and whose blocks are overwritten, and the producer does "
    "not hear of it.",
    share=1, together=1, protections=("lease words",),
)  # fmt: skip
async def ended(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, theirs = stage.text(draw, 200), stage.salt(draw), stage.name()
    await stage.through(trial, text, stage.salt(draw))  # they know each other
    params = await stage.prefilled(text, salt, theirs)
    await stage.prefill.do("expire", theirs)
    before = await stage.decode.do("disarm", "lose Redeem")
    if await stage.prefill.until("lease_is_over", theirs):
        count = await stage.prefill.do("overwrite", theirs)
        await stage.decode.do("arm", "lose Redeem", "", 1 << 20)
        name = await stage.decoded(trial, text, params, salt)
        lost = await stage.decode.do("disarm", "lose Redeem") - before
        trial.injected = (
            f"{count} blocks overwritten, and {lost} redemption(s) lost" if count and lost else ""
        )
        trial.detected = await stage.failed(name, WORD_CHANGED)


def _declare(name: str, says: str, fault: str, **more: object) -> None:
    @kind(name, TRANSFER, says, share=5, **more)
    async def changes(stage: Stage, trial: Trial, draw: random.Random) -> None:
        text, salt, mine = stage.text(draw), stage.salt(draw), stage.name()
        params = await stage.prefilled(text, salt)
        await stage.decode.do("arm", fault, mine)
        await stage.decoded(trial, text, params, salt, mine)
        await stage.decode.do("disarm", fault, mine)
        trial.injected = await stage.decode.do("changed", mine)
        trial.detected = await stage.failed(mine, OTHER_BYTES)


_declare("a bit changes on the way", "One bit of what is read arrives flipped.", "flip a bit")
_declare(
    "signs change on the way", "The last blocks of each KV cache group arrive with their signs flipped.",
    "flip signs", protections=("verified transfers",),
)  # fmt: skip


@kind("transport refuses the read", TRANSFER, "The transport raises when a read is posted.", share=12)
async def refused(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw), stage.salt(draw), stage.name()
    params = await stage.prefilled(text, salt)
    await stage.decode.do("arm", "refuse", mine)
    await stage.decoded(trial, text, params, salt, mine)
    count = await stage.decode.do("disarm", "refuse", mine)
    trial.injected = f"{count} posts raised" if count else ""
    trial.detected = await stage.failed(mine, "the transport refused the read")


@kind(
    "read after its deadline", TRANSFER, "A read is posted after the request has gone on without it.", share=3
)
async def late(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 200), stage.salt(draw), stage.name()
    params = await stage.prefilled(text, salt)
    await stage.decode.do("arm", "hold", mine)
    await stage.decoded(trial, text, params, salt, mine)
    trial.injected = "the read was held back" if await stage.decode.do("holds", mine) else ""
    await stage.decode.do("let_go", mine)
    await stage.decode.do("disarm", "hold", mine)
    trial.detected = await stage.failed(mine, LATE)


@kind(
    "late bytes land among others", TRANSFER,
    "A read that is past its deadline lands while other requests fill the pool.",
    together=1, share=0.3, protections=("pins",),
)  # fmt: skip
async def lands_late(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 330), stage.salt(draw), stage.name()
    params = await stage.prefilled(text, salt)
    await stage.decode.do("arm", "hold", mine)
    await stage.decoded(trial, text, params, salt, mine)
    held = await stage.decode.do("holds", mine)
    pinned = (await stage.decode.do("counters"))["pins"]
    await stage.decode.do("forget_prefixes")
    others = [
        asyncio.create_task(stage.decoded(trial, text, None, stage.salt(draw), tokens=100))
        for text in stage.references.long * 3
    ]
    # Some pools are never full, because vLLM runs one such prompt after the other in them.
    while sum(other.done() for other in others) < 8:
        free = await stage.decode.do("free_blocks")
        if free < 30 or await stage.decode.do("would_overwrite", mine) > 1:
            break
        await asyncio.sleep(0.02)
    await stage.decode.do("let_go", mine)
    await asyncio.gather(*others)
    await stage.decode.do("disarm", "hold", mine)
    trial.injected = f"{held} reads posted {DEADLINE:g} s late, with {free} blocks free" if held else ""
    trial.detected = await stage.failed(mine, LATE) if pinned else ""


@kind(
    "offer withdrawn",
    TRANSFER,
    "The producer resets its caches while an offer is under way.",
    share=0.3,
    together=1,
)
async def withdrawn(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, theirs = stage.text(draw, 129), stage.salt(draw), stage.name()
    params = await stage.prefilled(text, salt, theirs)
    await stage.prefill.do("reset_all")
    if await stage.prefill.until("lease_is_over", theirs):
        count = await stage.prefill.do("overwrite", theirs)
        trial.injected = f"reset, and {count} blocks overwritten"
    name = await stage.decoded(trial, text, params, salt)
    trial.detected = await stage.failed(name, f"{UNKNOWN_TICKET}|{WORD_CHANGED}")


@kind(
    "consumer resets",
    TRANSFER,
    "The consumer resets its caches while a read is held back.",
    share=0.3,
    together=1,
)
async def consumer_resets(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 129), stage.salt(draw), stage.name()
    params = await stage.prefilled(text, salt)
    await stage.decode.do("arm", "hold", mine)
    answer = asyncio.create_task(stage.decoded(trial, text, params, salt, mine))
    if await stage.decode.until("holds", mine, seconds=DEADLINE):
        await stage.decode.do("reset_all")
        trial.injected = "reset while the read was held back"
    await stage.decode.do("let_go", mine)
    await answer
    trial.detected = "; ".join(one["event"] for one in await stage.told(mine, "LoadEnded"))
    await stage.decoded(trial, text, None, salt)


@kind(
    "preemption",
    TRANSFER,
    "The decode engine has too few blocks and preempts requests it has loaded.",
    share=0.3,
    together=1,
)
async def preempted(stage: Stage, trial: Trial, draw: random.Random) -> None:
    before = await stage.decode.do("preemptions")
    long = stage.references.long
    salts = [stage.salt(draw) for _ in long]
    offers = [await stage.prefilled(text, salt) for text, salt in zip(long, salts, strict=True)]
    asked = [
        asyncio.create_task(stage.decoded(trial, text, offer, salt, tokens=LONG_TOKENS))
        for text, offer, salt in zip(long, offers, salts, strict=True)
    ]
    await stage.decode.until("runs", 2)
    await stage.decode.do("take_blocks")
    try:
        await stage.decode.until("has_preempted", before)
    finally:
        await stage.decode.do("give_blocks")
    names = await asyncio.gather(*asked)
    count = await stage.decode.do("preemptions") - before
    loaded = sum([len(await stage.told(name, "LoadBegan")) for name in names])
    trial.injected = f"{count} preemptions, {loaded} loads" if count and loaded else ""
    trial.detected = f"{trial.answers} answers after {count} preemptions" if count else ""
