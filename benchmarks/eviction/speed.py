"""The time that policies take for each evicted chunk."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

from benchmarks.order import rotated
from kvferry.tiers import EVICTION_POLICIES
from kvferry.tools.measuring.rounds import Spread

_CAPACITIES = (1_000, 30_000)  # in chunks
_CHUNKS, _REQUESTS, _ROUNDS = 30, 2_000, 7


def measure_speed(progress: Callable[[str], None]) -> Mapping[str, Spread]:
    """Measure each policy at each capacity. Return the seconds for a chunk, by policy and capacity."""
    found: dict[str, list[float]] = {}
    for number in range(_ROUNDS):
        for capacity in _CAPACITIES:
            for name in rotated(list(EVICTION_POLICIES), number):
                progress(f"round {number + 1} of {_ROUNDS}: {name}")
                of = found.setdefault(f"{name}, {capacity:,} chunks", [])
                of.append(_seconds_for_a_chunk(name, capacity))
    return {name: Spread.of(seconds) for name, seconds in found.items()}


def _seconds_for_a_chunk(name: str, capacity: int) -> float:
    """Store and use prompts of a full tier. Every third is the next turn of an earlier one."""
    policy, chance = EVICTION_POLICIES[name](capacity), random.Random(0)  # noqa: S311 - a simulation
    prompts: list[list[bytes]] = []
    stored, began = 0, 0.0
    for number in range(2 * capacity // _CHUNKS + _REQUESTS):
        if number == 2 * capacity // _CHUNKS:
            stored, began = 0, time.process_time()
        last = prompts[chance.randrange(len(prompts))] if prompts and not number % 3 else []
        prompt = last[: 2 * _CHUNKS] + [b"%d %d" % (number, chunk) for chunk in range(_CHUNKS)]
        prompts.append(prompt)
        new = [key for key in prompt if key not in policy]
        held = [key for key in prompt if key in policy]
        policy.pin_all(held)
        if (missing := policy.used_bytes + len(new) - capacity) > 0:
            policy.evict_bytes(missing)
        policy.admit_all(new[::-1], 1)
        policy.unpin_all(held)
        policy.mark_used(prompt, 256 * len(prompt))
        stored += len(new)
    return (time.process_time() - began) / stored
