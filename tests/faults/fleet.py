"""Faults of engines that read each other's host memory: of holders, their slots, and the directory."""

from __future__ import annotations

import asyncio
import os
import random
import signal

from faults.kinds import kind
from faults.network import STRANGER
from faults.stage import DEADLINE, LATE, Stage
from faults.storage import new_misses
from faults.values import Area, Trial

FLEET = Area.FLEET
_BAD_CHUNK = f"a chunk of the fleet tier|{LATE}"
ALONE = {"together": 1, "share": 0.3}
"""All reads of the decode engine in the fleet are held back, or all its look-ups are wrong."""


async def _noticed(stage: Stage, name: str, misses: dict[str, int]) -> str:
    """What the decode engine said of a request's chunks in the fleet; empty if nothing."""
    new = await new_misses(stage, misses)
    return await stage.failed(name, _BAD_CHUNK) or ", ".join(
        f"{count} {what}" for what, count in new.items() if what.startswith("fleet ")
    )


async def _share_names(stage: Stage) -> None:
    """Let both engines find each other's chunks. Other faults may have reset their caches."""
    for engine in (stage.prefill, stage.decode):
        await engine.do("share_names")


async def _held(stage: Stage, trial: Trial, text: list[int], salt: str) -> None:
    """Have the prefill engine answer a prompt, and keep its chunks in host memory."""
    await _share_names(stage)
    await stage.asked(stage.prefill, trial, text, None, salt)
    await stage.prefill.until("tiers_are_idle")


async def _reading(
    stage: Stage, trial: Trial, text: list[int], salt: str, name: str
) -> asyncio.Task[str] | None:
    """Ask the decode engine for a prompt that the prefill engine has, and hold its READs back.

    Returns:
        The request; None if it reads nothing.
    """
    await _held(stage, trial, text, salt)
    await stage.in_fleet(text, salt)
    await stage.decode.do("hold_fleet_reads")
    answer = asyncio.create_task(stage.decoded(trial, text, None, salt, name))
    if await stage.decode.until("held_fleet_reads", seconds=DEADLINE):
        return answer
    await stage.decode.do("let_fleet_reads_go")
    await answer
    return None


@kind(
    "slot reused during the read", FLEET,
    "The holder evicts chunks, and fills their slots with others, after it has said where they are.",
    together=1, share=5, protections=("fleet digest",),
)  # fmt: skip
async def reused(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 200), stage.salt(draw), stage.name()
    misses = await stage.decode.do("missed")
    if (answer := await _reading(stage, trial, text, salt, mine)) is None:
        return
    try:
        count = await stage.prefill.do("reuse_slots", text, salt, stage.references.adapter_of(text))
        trial.injected = f"{count} slots filled with other bytes before they were read" if count else ""
    finally:
        await stage.decode.do("let_fleet_reads_go")
    await answer
    trial.detected = await _noticed(stage, mine, misses)


@kind("holder killed", FLEET, "An engine is killed while another one reads its host memory.", **ALONE)
async def killed(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 200), stage.salt(draw), stage.name()
    misses = await stage.decode.do("missed")
    if (answer := await _reading(stage, trial, text, salt, mine)) is None:
        return
    pid = stage.prefill.pid
    try:
        await stage.kill("prefill")
    finally:
        await stage.decode.do("let_fleet_reads_go")
    await answer
    trial.injected = f"SIGKILL of process {pid}, with READs of its memory ordered"
    trial.detected = await _noticed(stage, mine, misses)
    await stage.start_anew("prefill")
    if not await _read_again(stage, trial, draw):
        trial.detected = ""  # the one in its place must be read


@kind(
    "holder restarted", FLEET,
    "An engine is killed, and another with other chunks starts at the same address, before it is read.",
    **ALONE,
)  # fmt: skip
async def restarted(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 200), stage.salt(draw), stage.name()
    await _read_again(stage, trial, draw)  # the decode engine has the old run's memory
    await _held(stage, trial, text, salt)
    pid = stage.prefill.pid
    await stage.restart("prefill")
    for _ in range(3):  # the slots are in use again
        await _held(stage, trial, stage.text(draw, 200), stage.salt(draw))
    misses = await stage.decode.do("missed")
    await stage.decode.do("believe_holder", text, salt, stage.references.adapter_of(text), stage.holder)
    await stage.decoded(trial, text, None, salt, mine)
    trial.injected = f"process {pid} became {stage.prefill.pid}"
    trial.detected = await _noticed(stage, mine, misses)
    if not await _read_again(stage, trial, draw):
        trial.detected = ""  # the one in its place must be read


@kind(
    "directory of the fleet lost", FLEET,
    "The directory is stopped or killed while engines look up chunks, and comes back empty.", **ALONE,
)  # fmt: skip
async def lost(stage: Stage, trial: Trial, draw: random.Random) -> None:
    (known, text), salt = [stage.text(draw, 200) for _ in range(2)], stage.salt(draw)
    async with stage.fleet_directory() as server:
        await _held(stage, trial, known, salt)
        await _held(stage, trial, text, stage.salt(draw))
        if not await stage.in_fleet(known, salt, asked=False):
            return
        if stops := draw.random() < 0.5:
            os.kill(server._process.pid, signal.SIGSTOP)
            await stage.decoded(trial, text, None, stage.salt(draw))
        server.terminate()
        await stage.decoded(trial, text, None, stage.salt(draw))
        failures = await stage.decode.do("directory_failures")
        trial.injected = "SIGSTOP, and SIGKILL" if stops else "SIGKILL"
        trial.detected = f"{failures} look-ups failed" if failures else ""
    async with stage.fleet_directory():
        if not await _read_again(stage, trial, draw, asked=False):
            trial.detected = ""  # it must be usable again


@kind(
    "directory of the fleet lies", FLEET,
    "The directory says that chunks are at an engine that never had them, or that is none.", **ALONE,
)  # fmt: skip
async def lies(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 200), stage.salt(draw), stage.name()
    lie, met = draw.choice(["an engine without them", "an address where nobody is", STRANGER]), []

    async def meet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(1)
        writer.close()

    await _share_names(stage)
    adapter, stranger = stage.references.adapter_of(text), await asyncio.start_server(meet, STRANGER, 0)
    async with stage.fleet_directory() as server:
        run, chunks = await stage.prefill.do("directory_entries", text, salt, adapter)
        if not lie.startswith("an engine"):
            run = draw.randbytes(8)
            at = stranger.sockets[0].getsockname() if lie == STRANGER else ("127.0.0.1", 9)
            server.client().set(await stage.prefill.do("directory_run", run), f"{at[0]}:{at[1]}")
        for name in chunks:
            server.client().sadd(name, run)
        misses = await stage.decode.do("missed")
        if count := await stage.in_fleet(text, salt, asked=False):
            trial.injected = f"{count} chunks, the directory says, are at {lie}"
        await stage.decoded(trial, text, None, salt, mine)
        trial.detected = await _noticed(stage, mine, misses)
    stranger.close()
    if met:
        trial.forbidden.append(f"the engine dialled {STRANGER}, which is none of the peers")


@kind(
    "directory of the fleet stale", FLEET,
    "The directory names the holder of chunks that it has evicted since.", **ALONE,
)  # fmt: skip
async def stale(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 200), stage.salt(draw), stage.name()
    adapter = stage.references.adapter_of(text)
    async with stage.fleet_directory() as server:
        await _held(stage, trial, text, salt)
        if not await stage.in_fleet(text, salt, asked=False):
            return
        run, names = await stage.prefill.do("directory_entries", text, salt, adapter)
        count = await stage.prefill.do("evict_chunks", text, salt, adapter)
        await asyncio.sleep(0.3)  # the engine has withdrawn them
        withdrawn = [name for name in names if not server.client().exists(name)]
        for name in withdrawn:
            server.client().sadd(name, run)
        misses = await stage.decode.do("missed")
        await stage.in_fleet(text, salt, asked=False)
        await stage.decoded(trial, text, None, salt, mine)
        if withdrawn:
            trial.injected = f"{count} chunks evicted, which the directory still has"
        trial.detected = await _noticed(stage, mine, misses)


async def _read_again(stage: Stage, trial: Trial, draw: random.Random, *, asked: bool = True) -> bool:
    """Return whether the decode engine reads a new prompt's chunks in the prefill engine's host memory."""
    text, salt, mine = stage.text(draw, 200), stage.salt(draw), stage.name()
    await _held(stage, trial, text, salt)
    known, before = await stage.in_fleet(text, salt, asked=asked), await stage.decode.do("fetched_in_fleet")
    await stage.decoded(trial, text, None, salt, mine)
    return bool(known) and await stage.decode.do("fetched_in_fleet") > before
