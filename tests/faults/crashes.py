"""Faults of whole engines: stopped, killed, restarted, and reset."""

from __future__ import annotations

import asyncio
import random
import signal

from faults import other_weights
from faults.kinds import kind
from faults.served import Served
from faults.stage import DEADLINE, LATE, LEASE, UNANSWERED, UNKNOWN_TICKET, WORD_CHANGED, Stage
from faults.values import Area, Trial

ENGINE = Area.ENGINE


@kind(
    "producer stops",
    ENGINE,
    "The prefill engine's process is stopped while it is read from.",
    together=1,
    share=0.3,
)
async def producer_stops(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 256), stage.salt(draw), stage.name()
    params = await stage.prefilled(text, salt)
    stage.prefill.signal(signal.SIGSTOP)
    try:
        await stage.decoded(trial, text, params, salt, mine)
        trial.injected = f"stopped for {DEADLINE:g} s and more"
    finally:
        stage.prefill.signal(signal.SIGCONT)
    trial.detected = await stage.failed(mine, f"{LATE}|{UNANSWERED}")
    await stage.through(trial, stage.text(draw), stage.salt(draw))


@kind(
    "consumer stops",
    ENGINE,
    "The decode engine's process is stopped for longer than a lease.",
    together=1,
    share=0.3,
)
async def consumer_stops(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine, theirs = stage.text(draw, 200), stage.salt(draw), stage.name(), stage.name()
    params = await stage.prefilled(text, salt, theirs)
    await stage.decode.do("arm", "hold", mine)
    answer = asyncio.create_task(stage.decoded(trial, text, params, salt, mine))
    held = await stage.decode.until("holds", mine, seconds=DEADLINE)
    stage.decode.signal(signal.SIGSTOP)
    try:
        over = await stage.prefill.until("lease_is_over", theirs, seconds=LEASE + 20)
        count = await stage.prefill.do("overwrite", theirs) if over else 0
    finally:
        stage.decode.signal(signal.SIGCONT)
    await stage.decode.do("let_go", mine)
    await answer
    trial.injected = f"stopped until the lease was over and {count} blocks overwritten" if held else ""
    trial.detected = await stage.failed(mine, LATE)


@kind(
    "producer killed",
    ENGINE,
    "The prefill engine is killed with leases held, and another starts.",
    together=1,
    share=0.3,
)
async def producer_killed(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 200), stage.salt(draw), stage.name()
    params = await stage.prefilled(text, salt)
    pid = stage.prefill.pid
    await stage.restart("prefill")
    trial.injected = f"SIGKILL; process {pid} became {stage.prefill.pid}"
    await stage.decoded(trial, text, params, salt, mine)
    trial.detected = await stage.failed(mine, f"{UNANSWERED}|restarted|another run|the transport")
    await stage.through(trial, stage.text(draw), stage.salt(draw))


@kind(
    "consumer killed",
    ENGINE,
    "The decode engine is killed while it loads, and another starts.",
    together=1,
    share=0.3,
)
async def consumer_killed(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine, theirs = stage.text(draw, 200), stage.salt(draw), stage.name(), stage.name()
    params = await stage.prefilled(text, salt, theirs)
    await stage.decode.do("arm", "hold", mine)
    await stage.decode.ask(mine, text, params, 6, salt)
    if await stage.decode.until("holds", mine, seconds=DEADLINE):
        trial.injected = "SIGKILL while a read was held back"
    await stage.restart("decode")
    if await stage.prefill.until("lease_is_over", theirs, seconds=LEASE + 20):
        trial.detected = "the producer took its blocks back"
    await stage.through(trial, text, stage.salt(draw))


@kind(
    "consumer killed while storing",
    ENGINE,
    "The decode engine is killed while it writes chunks.",
    together=1,
    share=0.3,
)
async def killed_storing(stage: Stage, trial: Trial, draw: random.Random) -> None:
    texts, salt = [stage.text(draw, 256) for _ in range(3)], stage.salt(draw)
    await stage.decode.do("hang_files", "_write_chunk")
    for text in texts:
        await stage.decode.ask(stage.name(), text, None, 1, salt)
    await stage.decode.until("hung_files", "_write_chunk")
    half = len(list(stage.directory.rglob("*.tmp")))
    await stage.restart("decode")
    trial.injected = f"SIGKILL with {half} files half written" if half else ""
    for text in texts:
        await stage.decoded(trial, text, None, salt)
    trial.detected = "what it had stored was sound" if trial.answers == len(texts) else ""


@kind(
    "weights reloaded",
    ENGINE,
    "A trainer gives the prefill engine other weights while it runs.",
    together=1,
    share=0.3,
    protections=("weights",),
    families=("gemma3",),
)
async def reloaded(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 200), stage.salt(draw), stage.name()
    try:
        await stage.prefill.do("reload_weights", str(stage.folder / other_weights.FOLDER))
        trial.injected = "the prefill engine computes with other weights"
        params = await stage.prefilled(text, salt)
        await stage.decoded(trial, text, params, salt, mine)
        offered = params["remote_num_tokens"] > 0
        trial.detected = (
            await stage.failed(mine, f"{UNKNOWN_TICKET}|{WORD_CHANGED}")
            if offered
            else "the engine offers nothing any more"
        )
        if any(one["outcome"] == "ready" for one in await stage.told(mine, "LoadEnded")):
            trial.forbidden.append(f"request {mine} loaded KV of other weights")
    finally:
        await stage.restart("prefill")
    await stage.through(trial, stage.text(draw), stage.salt(draw))


@kind(
    "caches reset",
    ENGINE,
    "An operator resets the caches of both engines while requests run.",
    together=1,
    share=0.3,
)
async def reset(stage: Stage, trial: Trial, draw: random.Random) -> None:
    texts = [stage.text(draw, 129) for _ in range(4)]
    salt = stage.salt(draw)
    asked = [asyncio.create_task(stage.through(trial, text, salt)) for text in texts]
    await asyncio.sleep(draw.random() * 0.3)
    counts = []
    for engine in (stage.prefill, stage.decode):
        asked.append(asyncio.create_task(stage.asked(engine, trial, stage.text(draw), None, salt)))
        await asyncio.sleep(0)  # the engine takes the request, and both commands, before its next step
        count, _ = await asyncio.gather(engine.do("under_way"), engine.do("reset_all"))
        counts.append(count)
    if all(counts):
        trial.injected = f"{' and '.join(map(str, counts))} requests were under way when the two were reset"
    await asyncio.gather(*asked)
    mine = stage.name()
    await stage.decode.do("forget_prefixes")
    await stage.decoded(trial, texts[0], None, salt, mine)
    available = [one["cached_tokens"] for one in await stage.told(mine, "Scheduled")]
    trial.detected = (
        f"{len(asked)} answers beside the reset" if trial.answers > len(asked) else str(available)
    )


@kind(
    "engines wait for each other",
    ENGINE,
    "Both engines have no blocks but those that they keep for requests of each other.",
    together=1,
    share=0.3,
)
async def waiting(stage: Stage, trial: Trial, draw: random.Random) -> None:
    ways = [(stage.prefill, stage.decode), (stage.decode, stage.prefill)]
    asked: list[tuple[Served, str, asyncio.Task[str]]] = []
    prompts = [(stage.text(draw, 200), stage.salt(draw), *way) for way in ways * 2]
    offers = [await stage.prefilled(text, salt, engine=has) for text, salt, has, _ in prompts]
    try:
        for engine in (stage.prefill, stage.decode):
            await engine.do("take_blocks")
        for (text, salt, _, to), offer in zip(prompts, offers, strict=True):
            name = stage.name()
            asked.append((to, name, asyncio.create_task(stage.asked(to, trial, text, offer, salt, name))))
        for _ in range(200):
            found = [await stage.failed(name, "no request has got blocks", at) for at, name, _ in asked]
            trial.detected = next(filter(None, found), "")
            if trial.detected:
                break
            await asyncio.sleep(0.1)
        trial.injected = f"{len(asked)} requests waited for blocks"
    finally:
        for engine in (stage.prefill, stage.decode):
            await engine.do("give_blocks")
    await asyncio.gather(*(task for *_, task in asked))
