"""Faults of storage: damaged, missing and swapped chunks, disks that are full, hang or fail."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from faults.kinds import kind
from faults.served import Served
from faults.stage import DEADLINE, LATE, Stage
from faults.values import Area, Trial
from kvferry.tiers.names import PutOutcome
from support.vllm_engine.tiered import spoil

STORAGE = Area.STORAGE
LISTED = "the directory had been listed again by then"
_BAD_CHUNK = "a chunk of the file tier: (corrupt|absent)"


async def stored(stage: Stage, trial: Trial, text: list[int], salt: str) -> list[Path]:
    """Have the decode engine answer a prompt and store it; return the files of its chunks.

    A chunk is not stored where host memory is full of chunks of others. If the others do not suffice for a
    load, the prompt is asked for again.
    """
    for _ in range(4):
        await stage.decoded(trial, text, None, salt)
        await stage.decode.until("tiers_are_idle")
        await _forgotten(stage)
        if await stage.tokens_at_hand(text, salt):
            return [Path(each) for each in await stage.files_of(text, salt)]
    return []


async def _forgotten(stage: Stage, engine: Served | None = None) -> None:
    """Leave an engine, that for decode if none is named, nothing but what is in storage."""
    await (engine or stage.decode).do("forget_prefixes")
    await (engine or stage.decode).do("clear_host")


def _digest(paths: list[Path]) -> str:
    found = hashlib.blake2b()
    for path in paths:
        found.update(path.read_bytes() if path.is_file() else b"none")
    return found.hexdigest()


async def new_misses(stage: Stage, before: dict[str, int]) -> dict[str, int]:
    """How many chunks storage has not given the decode engine since then, by tier and why."""
    now = await stage.decode.do("missed")
    return {what: n - before.get(what, 0) for what, n in now.items() if n != before.get(what, 0)}


def _clear_away(paths: list[Path]) -> None:
    """Remove what a trial has damaged and kvferry has not moved aside."""
    for path in paths:
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)


def _flip(path: Path, draw: random.Random) -> None:
    image = bytearray(path.read_bytes())
    image[draw.randrange(len(image))] ^= 1 << draw.randrange(8)
    path.write_bytes(image)


def _truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def _grow(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(4096))


def _header(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(4096) + path.read_bytes()[4096:])


def _replace_by_folder(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


async def _damaged(
    stage: Stage, trial: Trial, draw: random.Random, what: str, damage: Callable[[Path, random.Random], None]
) -> None:
    """Store a prompt, damage its chunks, and ask for it again with nothing but storage at hand."""
    text, salt, mine = stage.text(draw, 200), stage.salt(draw), stage.name()
    async with stage.storage:
        await _damaged_alone(stage, trial, draw, (text, salt, mine), (what, damage))


async def _damaged_alone(
    stage: Stage,
    trial: Trial,
    draw: random.Random,
    asked: tuple[list[int], str, str],
    how: tuple[str, Callable[[Path, random.Random], None]],
) -> None:
    (text, salt, mine), (what, damage) = asked, how
    paths = await stored(stage, trial, text, salt)
    before = _digest(paths)
    for path in paths:
        damage(path, draw)
    if paths and _digest(paths) != before:
        trial.injected = f"{len(paths)} files: {what}"
    gone = not any(path.is_file() for path in paths)
    await _forgotten(stage)
    misses = await stage.decode.do("missed")
    await stage.decoded(trial, text, None, salt, mine)
    new = await new_misses(stage, misses)
    trial.detected = await stage.failed(mine, _BAD_CHUNK) or ", ".join(
        f"{n} {name}" for name, n in new.items()
    )
    if gone and not trial.detected and not await stage.told(mine, "LoadBegan"):
        trial.detected = LISTED
    _clear_away(paths)


def _declare(name: str, says: str, damage: Callable[[Path, random.Random], None], **more: object) -> None:
    @kind(name, STORAGE, says, together=16, **more)
    async def damaged(stage: Stage, trial: Trial, draw: random.Random) -> None:
        await _damaged(stage, trial, draw, name, damage)


_declare("bit flip in a chunk", "One bit of each chunk file of a prompt is flipped.", _flip, share=16)
_declare(
    "signs flipped in a chunk", "A sign in the body of each chunk file is flipped.",
    lambda path, _: spoil(path, with_checksum=False), share=10,
)  # fmt: skip
_declare("chunk cut off", "Each chunk file is cut off somewhere.", _truncate)
_declare("chunk too long", "Each chunk file has 4096 bytes more.", _grow)
_declare("header overwritten", "The first page of each chunk file is random.", _header)
_declare("chunk gone", "Chunk files are removed while the engine knows them.", lambda path, _: path.unlink())
_declare("folder in place of a chunk", "Each chunk file is replaced by a folder.", _replace_by_folder)


@kind(
    "chunks of two prompts swapped", STORAGE, "Chunk files of two prompts change places.",
    together=16, share=12, protections=("checksum",),
)  # fmt: skip
async def swapped(stage: Stage, trial: Trial, draw: random.Random) -> None:
    async with stage.storage:
        await _swapped_alone(stage, trial, draw)


async def _swapped_alone(stage: Stage, trial: Trial, draw: random.Random) -> None:
    salt, mine = stage.salt(draw), stage.name()
    first, second = draw.sample([one for one in stage.references.texts if len(one) >= 300], 2)
    mine_files, theirs = await stored(stage, trial, first, salt), await stored(stage, trial, second, salt)
    pairs = [(a, b) for a, b in zip(mine_files, theirs, strict=False) if a.stat().st_size == b.stat().st_size]
    before = _digest(mine_files)
    for one, other in pairs:
        images = one.read_bytes(), other.read_bytes()
        one.write_bytes(images[1])
        other.write_bytes(images[0])
    if pairs and _digest(mine_files) != before:
        trial.injected = f"{len(pairs)} files swapped"
    await _forgotten(stage)
    misses = await stage.decode.do("missed")
    await stage.decoded(trial, first, None, salt, mine)
    await _forgotten(stage)
    await stage.decoded(trial, second, None, salt)
    now = await stage.decode.do("missed")
    trial.detected = await stage.failed(mine, _BAD_CHUNK) or ("" if now == misses else str(now))
    _clear_away([path for pair in pairs for path in pair])


@kind(
    "directory removed",
    STORAGE,
    "The whole directory of the tier is removed while it serves.",
    together=1,
    share=0.3,
)
async def directory_removed(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 200), stage.salt(draw), stage.name()
    files = await stored(stage, trial, text, salt)
    namespaces = {path.parents[1] for path in files}
    for folder in namespaces:
        shutil.rmtree(folder, ignore_errors=True)
    trial.injected = f"{len(namespaces)} folder(s) with {len(files)} chunks removed" if files else ""
    misses = await stage.decode.do("missed")
    await _forgotten(stage)
    await stage.decoded(trial, text, None, salt, mine)
    now = await stage.decode.do("missed")
    trial.detected = await stage.failed(mine, _BAD_CHUNK) or ("" if now == misses else str(now))
    if not trial.detected and not await stage.told(mine, "LoadBegan"):
        trial.detected = LISTED
    other = stage.salt(draw)
    if not await stored(stage, trial, text, other):
        trial.detected = ""  # it must be usable again


def dropped_since(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    """Return how many stores were dropped meanwhile, by why; what was stored does not count."""
    more = {why: n - before.get(why, 0) for why, n in now.items() if PutOutcome(why).dropped}
    return {why: n for why, n in more.items() if n}


@kind(
    "file system is full",
    STORAGE,
    "The kernel refuses to make files larger than 2,000 bytes.",
    together=1,
    share=0.3,
)
async def full(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt = stage.text(draw, 200), stage.salt(draw)
    before = await stage.decode.do("dropped")
    await stage.decode.do("limit_files", 2000)
    try:
        await stage.decoded(trial, text, None, salt)
        await stage.decode.until("tiers_are_idle")
    finally:
        await stage.decode.do("limit_files", -1)
    new = dropped_since(before, await stage.decode.do("dropped"))
    trial.injected = f"{sum(new.values())} writes refused by the kernel" if new else ""
    trial.detected = ", ".join(f"{n} {name}" for name, n in new.items())
    await stage.decoded(trial, text, None, stage.salt(draw))


@kind(
    "disk errors on write",
    STORAGE,
    "Writes of chunks fail with EIO, ENOSPC or EDQUOT.",
    together=1,
    share=0.3,
)
async def write_fails(stage: Stage, trial: Trial, draw: random.Random) -> None:
    number = draw.choice([errno.EIO, errno.ENOSPC, errno.EDQUOT])
    text, salt = stage.text(draw, 200), stage.salt(draw)
    before, seen = await stage.decode.do("disarm", "errno _write_chunk"), await stage.decode.do("dropped")
    gone = await stage.decode.do("evicted")
    await stage.decode.do("fail_files", "_write_chunk", number, 3)
    await stage.decoded(trial, text, None, salt)
    await stage.decode.until("tiers_are_idle")
    count = await stage.decode.do("disarm", "errno _write_chunk") - before
    new = dropped_since(seen, await stage.decode.do("dropped"))
    # On a full disk, chunks go for new ones, and a store is repeated.
    new |= {"evicted": more} if (more := await stage.decode.do("evicted") - gone) else {}
    trial.injected = f"{count} writes failed with {errno.errorcode[number]}" if count else ""
    trial.detected = ", ".join(f"{n} {name}" for name, n in new.items())
    await stage.decode.do("forget_prefixes")
    await stage.decoded(trial, text, None, salt)


@kind("disk errors on read", STORAGE, "Reads of chunks fail with EIO.", together=1, share=0.3)
async def read_fails(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 200), stage.salt(draw), stage.name()
    await stored(stage, trial, text, salt)
    await _forgotten(stage)
    before, misses = await stage.decode.do("disarm", "errno _get"), await stage.decode.do("missed")
    await stage.decode.do("fail_files", "_get", errno.EIO, 1 + draw.randrange(4))
    await stage.decoded(trial, text, None, salt, mine)
    count = await stage.decode.do("disarm", "errno _get") - before
    now = await stage.decode.do("missed")
    trial.injected = f"{count} reads failed with EIO" if count else ""
    trial.detected = await stage.failed(mine, "I/O error") or ("" if now == misses else str(now))


@kind(
    "reads hang",
    STORAGE,
    "A mount hangs while chunks are read, for longer than a load's deadline.",
    together=1,
    share=0.3,
)
async def reads_hang(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 200), stage.salt(draw), stage.name()
    await stored(stage, trial, text, salt)
    await _forgotten(stage)
    await stage.decode.do("hang_files", "get")
    try:
        await stage.decoded(trial, text, None, salt, mine)
    finally:
        count = await stage.decode.do("unhang_files", "get")
    trial.injected = f"{count} reads hung for {DEADLINE:g} s and more" if count else ""
    trial.detected = await stage.failed(mine, LATE)
    await stage.rest()


@kind("writes hang", STORAGE, "A mount hangs while chunks are written.", together=1, share=0.3)
async def writes_hang(stage: Stage, trial: Trial, draw: random.Random) -> None:
    salts = [stage.salt(draw) for _ in range(4)]
    await stage.decode.do("hang_files", "put")
    try:
        for salt in salts:
            await stage.decoded(trial, stage.text(draw, 200), None, salt)
    finally:
        count = await stage.decode.do("unhang_files", "put")
    trial.injected = f"{count} writes hung" if count else ""
    trial.detected = f"{trial.answers} answers meanwhile" if trial.answers == len(salts) else ""
    await stage.decode.until("tiers_are_idle")


@kind(
    "two engines store at once",
    STORAGE,
    "Both engines compute and store one prompt at the same time.",
    share=5,
)
async def both_store(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt = stage.text(draw, 200), stage.salt(draw)
    engines = stage.prefill, stage.decode
    async with stage.storage:
        for _ in range(4):
            await asyncio.gather(*(stage.asked(one, trial, text, None, salt) for one in engines))
            for one in engines:
                await one.until("tiers_are_idle")
                await _forgotten(stage, one)
            if all([await stage.tokens_at_hand(text, salt, one) for one in engines]):
                break
        files = await stage.files_of(text, salt)
        trial.injected = f"{len(files)} chunks stored by both" if files else ""
        loaded = []
        for one in engines:
            await _forgotten(stage, one)
            name = await stage.asked(one, trial, text, None, salt)
            loaded += [end["outcome"] for end in await stage.told(name, "LoadEnded", one)]
    trial.detected = "each engine loaded them" if loaded == ["ready", "ready"] else ""


@kind("copies fail", STORAGE, "Copies between blocks and host memory fail.", together=1, share=0.3)
async def copies_fail(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 200), stage.salt(draw), stage.name()
    await stored(stage, trial, text, salt)
    await stage.decode.do("forget_prefixes")
    before = await stage.decode.do("disarm", "copy")
    await stage.decode.do("fail_copies", 1)
    await stage.decoded(trial, text, None, salt, mine)
    count = await stage.decode.do("disarm", "copy") - before
    trial.injected = f"{count} copies failed" if count else ""
    trial.detected = await stage.failed(mine, "injected: the copy failed")


@kind(
    "chunks of other weights",
    STORAGE,
    "An engine with other weights has stored chunks of the same prompt in the directory.",
    protections=("namespace",),
)
async def weights_differ(stage: Stage, trial: Trial, draw: random.Random) -> None:
    asked = stage.of_other_weights()
    if asked is None:
        return
    (text, salt), mine = asked, stage.name()
    files = await stage.files_of(text, salt, stage.other_namespace)
    trial.injected = f"{len(files)} chunks of other weights" if files else ""
    await stage.decoded(trial, text, None, salt, mine)
    if await stage.told(mine, "LoadBegan"):
        trial.forbidden.append(f"request {mine} loaded chunks of other weights")
    else:
        trial.detected = "none of them was loaded"
