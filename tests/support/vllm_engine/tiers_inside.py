"""What goes wrong with the tiers of an engine, done to it in its own process: functions of `inside`."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.common.errors import KVFerryError
from support.vllm_engine import parts
from support.vllm_engine.parts import half, worker_half


def held(engine: Any, of: int = 0) -> dict[str, int]:
    """What requests, loads and stores hold, and is not nothing; host memory and its book must agree."""
    tiering, admission = parts.tiering(engine, of), half(engine, of).admission
    cache, source, stores = tiering._cache, tiering.source, tiering._stores
    worker = worker_half(engine, of)
    cache.host.check_integrity()
    counts = {
        "loads": len(admission.loads),
        "late": admission.loads.late_blocks(),
        "wishes": len(admission),
        "stores": len(stores._stores),
        "requests looked at": len(tiering._storing._progress),
        "named requests": len(tiering._prompts._known),
        "requests to serve": len(source._requests),
        "loads from tiers": sum(feed.busy for feed in source._feeds),
        "fetches": len(cache.fetches),
        "incoming": len(cache.incoming),
        "fills": len(cache.host._fills),
        "reads": len(cache.host._reads),
        "reading": sum(queue.reads.count for queue in cache.slow_tiers),
        "writing": sum(queue.writes.count for queue in cache.slow_tiers),
        "requests": len(engine.llm_engine.engine_core.engine_core.scheduler.requests),
    }
    if worker is not None:  # of one rank, it is in this process
        counts |= {
            "loads of the worker": len(worker._loads),
            "parts of the worker": len(worker._loads._parts),
            "attempts of the worker": len(worker._loads._attempts),
        }
    return {name: count for name, count in counts.items() if count}


def reset_all(engine: Any) -> bool:
    """Forget all prefixes and what the connector keeps, as an operator's call does."""
    return bool(engine.reset_prefix_cache(reset_connector=True))


def slow_copies(engine: Any, seconds: float) -> None:
    """Let every order of the rank's mover take so much longer; 0 for as long as it takes."""
    mover = parts.mover(engine)
    inner = type(mover)._copy

    def slower(key: str, what: Any) -> Any:
        time.sleep(seconds)
        return inner(mover, key, what)

    mover._copy = slower if seconds else inner.__get__(mover)


def slow_prompts(engine: Any, seconds: float) -> None:
    """Let every step that computes 128 tokens or more take so much longer, on all ranks."""
    executor = engine.llm_engine.engine_core.engine_core.model_executor
    inner = executor.execute_model

    def slower(output: Any, *args: Any, **kwargs: Any) -> Any:
        if output.total_num_scheduled_tokens >= 128:
            time.sleep(seconds)
        return inner(output, *args, **kwargs)

    executor.execute_model = slower


def wait_for_tiers(engine: Any) -> None:
    """Let every request wait for tiers as long as its patience, as if nothing were known of computing.

    A tiny model computes sooner than a busy machine reads files, and then nothing is loaded.
    """
    speeds = half(engine)._steps._speeds
    speeds._rate, speeds.record_computation = 0.0, lambda *_: None


def learned(engine: Any) -> tuple[float, int]:
    """Tokens per second of prompts, as steps have told since the last call; steps that have not ended."""
    speeds, steps = half(engine)._steps._speeds, half(engine)._steps
    rate, speeds._rate = speeds._rate, 0.0
    return rate, len(steps._under_way)


def slow_files(engine: Any, seconds: float, of: int = 0) -> None:
    """Let every fetch from a slow tier take so much longer."""
    for queue in parts.queues(engine, of):
        inner = queue.reads._call

        def slower(*args: Any, inner: Any = inner) -> Any:
            time.sleep(seconds)
            return inner(*args)

        queue.reads._call = slower


def wait_for_ledgers(engine: Any, seconds: float) -> None:
    """How long file tiers wait for a ledger that others hold, before they drop what they were to store.

    A thread that holds one, in a process whose engine spins, has the interpreter every few milliseconds only.
    """
    for queue in parts.queues(engine):
        queue.tier._ledger._lock_seconds = seconds


def hang(engine: Any, name: str) -> None:
    """Let the file tiers' `name` ("get", "put" or "refresh") hang until `go_on`."""
    engine.gate, engine.hanging, engine.gone_on = threading.Event(), Counter(), []
    for queue in parts.queues(engine):
        owner, attribute = parts.call_of(queue, name)
        inner = getattr(owner, attribute)

        def hanging(*args: Any, inner: Any = inner, **options: Any) -> Any:
            engine.hanging[name] += 1
            engine.gate.wait()
            return inner(*args, **options)

        setattr(owner, attribute, hanging)
        engine.gone_on.append(partial(setattr, owner, attribute, inner))


def hanging(engine: Any) -> dict[str, int]:
    """How many calls of each name have come to hang."""
    return dict(engine.hanging)


def go_on(engine: Any) -> None:
    """The mount is there again."""
    engine.gate.set()
    for restore in engine.gone_on:
        restore()


def stuck(engine: Any) -> list[tuple[bool, bool]]:
    """Of each slow tier, whether it counts as stuck for reading and for writing."""
    return [(queue.reads.stuck, queue.writes.stuck) for queue in parts.queues(engine)]


def tier_stats(engine: Any) -> list[dict[str, Any]]:
    """Of each slow tier: what became of chunks."""
    found = []
    for queue in parts.queues(engine):
        stats = queue.tier.stats
        found.append(
            {
                "puts": {str(what): n for what, n in stats.puts.items()},
                "gets": {str(what): n for what, n in stats.gets.items()},
                "evicted": stats.evicted,
            }
        )
    return found


def abort_at_random(engine: Any, prompts: list[list[int]], seed: int) -> dict[str, int]:
    """Run prompts, a few more in every step, and abort two of three some steps after they were admitted.

    Returns:
        How many were aborted in which state, and "while storing" any; and how many ended by themselves.
    """
    from vllm import SamplingParams

    rng = random.Random(seed)
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    stores = parts.stores(engine)
    engine.count = getattr(engine, "count", 1_000_000)
    steps_left: dict[str, int] = {}
    seen: Counter[str] = Counter()
    left = list(prompts)
    while left or scheduler.requests:
        for _ in range(min(len(left), rng.randrange(3))):
            engine.count += 1
            name, sampling = str(engine.count), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
            engine.llm_engine.add_request(name, {"prompt_token_ids": left.pop()}, sampling)
            if rng.random() < 2 / 3:
                steps_left[name] = rng.randrange(8)
        seen["ended"] += sum(output.finished for output in engine.llm_engine.step())
        for name, request in list(scheduler.requests.items()):
            outer = name.split("-")[0]
            if outer not in steps_left or request.status.name == "WAITING":
                continue
            steps_left[outer] -= 1
            if steps_left[outer] < 0:
                seen[request.status.name] += 1
                seen["while storing"] += bool(stores.busy)
                del steps_left[outer]
                engine.llm_engine.abort_request([outer])
    return dict(seen)


def ask_for(engine: Any, prompts: list[list[int]], seed: int, seconds: float) -> list[tuple[int, Any]]:
    """Ask for prompts drawn at random, some at once, and forget the engine's own prefixes now and then.

    For so long, and until most of them have been asked for, however slow the machine is.

    Returns:
        (number of the prompt, answer as of `inside.generate`) of each.
    """
    from support.vllm_engine.inside import generate

    rng = random.Random(seed)
    answers: list[tuple[int, Any]] = []
    until, asked = time.monotonic() + seconds, set[int]()
    while time.monotonic() < until or len(asked) <= len(prompts) / 2:
        drawn = rng.sample(range(len(prompts)), rng.randrange(1, 5))
        asked.update(drawn)
        answers += zip(drawn, generate(engine, [prompts[number] for number in drawn]), strict=True)
        if rng.random() < 1 / 3:
            engine.reset_prefix_cache()
    return answers


def fleet_tier(engine: Any) -> Any:
    return parts.queue_of(engine, "fleet").tier


def fleet_server(engine: Any) -> dict[str, int]:
    """Wait until the fleet tier serves. Return its port, its run, and how many chunks it has served."""
    tier = fleet_tier(engine)
    assert tier.ready.wait(60)
    return {name: getattr(tier.server, name) for name in ("port", "incarnation", "served")}


def spoil_host_memory(engine: Any) -> None:
    """Change the signs of what host memory holds, as if the ranks had stored it so."""
    cache = parts.cache(engine)
    for chunk in cache.host._ready.values():
        memory = np.frombuffer(cache._memory_at(chunk.offset, chunk.size), np.uint8)
        memory[3::4] ^= 0x80
        chunk.digest = b""


def spoil_reads(engine: Any, *, spoiled: bool) -> None:
    """Change a byte of each READ of another engine's host memory."""
    reader = fleet_tier(engine)._reader
    read = type(reader).read.__get__(reader)

    def spoil(incarnation: int, offset: int, into: memoryview) -> None:
        read(incarnation, offset, into)
        into[64] ^= 1

    reader.read = spoil if spoiled else read


def slow_reads(engine: Any, seconds: float, incarnation: int, begun: str) -> None:
    """Let each READ from a holder's run begin so much later, and touch a file before; note why READs fail."""
    engine.failed_reads, reader = [], fleet_tier(engine)._reader
    read = type(reader).read.__get__(reader)

    def slower(of: int, *where: Any) -> None:
        if of != incarnation:
            return read(of, *where)
        Path(begun).touch()
        time.sleep(seconds)
        try:
            read(of, *where)
        except KVFerryError as error:
            engine.failed_reads.append(str(error))
            raise

    reader.read = slower


def failed_reads(engine: Any) -> list[str]:
    """Why READs have failed since `slow_reads`."""
    return list(engine.failed_reads)
