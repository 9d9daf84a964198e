"""Replays beside the package `kvcache-simulator` from PyPI: equal hits, and the rules in which both differ.

Both have the same trace, the same model, a cache of the same size, and chunks as long as the trace's blocks.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from kvcache_sim.calculator import load_models_data
from kvcache_sim.simulator import run_sweep
from kvcache_sim.trace import parse_trace_lines

from kvferry.tools.models import read_model
from kvferry.tools.plan.find import find_config
from kvferry.tools.plan.kept import KeptSettings
from kvferry.tools.plan.side import EngineSide
from kvferry.tools.replay.settings import ReplaySettings, ServedModel, parse_tier, served_model
from kvferry.tools.replay.simulation import Simulation
from kvferry.tools.replay.trace.open import open_trace

BLOCK = 64
GIB = 1 << 30
STEP_TOKENS = 8192


class Prompt(NamedTuple):
    """A prompt: the ids of its blocks, of which the last may be incomplete, and its length in tokens."""

    ids: list[int]
    tokens: int


class Counted(NamedTuple):
    """Tokens of the counted prompts that were found, and all of them."""

    hits: int
    tokens: int


class Traced:
    """A trace in a file that both read."""

    def __init__(self, path: Path, prompts: list[Prompt]) -> None:
        lines = [
            json.dumps({"block_size": BLOCK, "hash_ids": one.ids, "input_length": one.tokens})
            for one in prompts
        ]
        path.write_text("".join(line + "\n" for line in lines))
        self.path, self._lines, self._warm_up = path, lines, len(lines) // 2

    def theirs(self, *capacities: int) -> dict[str, Any]:
        """Return the output of kvcache-simulator for caches of these numbers of blocks."""
        return run_sweep(
            parse_trace_lines(self._lines),
            model_id="llama-3.1-8b",
            budgets_gib=[blocks * block_bytes() / GIB for blocks in capacities],
            policies=["lru"],
            backend="python",
            models_data=models(),
        )

    def peer(self, *capacities: int) -> dict[int, Counted]:
        """Return what kvcache-simulator counts, by capacity in blocks."""
        points = {one["cacheBlocks"]: one["results"]["lru"] for one in self.theirs(*capacities)["points"]}
        return {blocks: Counted(one["hitTokens"], one["totalTokens"]) for blocks, one in points.items()}

    def replay(
        self, blocks: int | None, *, skip: int | None = None, chunk: int = BLOCK, step: int = STEP_TOKENS
    ) -> Counted:
        """Return what a replay with host memory alone counts.

        Args:
            blocks: number of the trace's blocks that host memory holds; None for no limit.
            skip: number of prompts that are not counted; None for those that the peer does not count.
            chunk: number of tokens per chunk.
            step: number of tokens per step of the engine.
        """
        trace = open_trace(self.path)
        tier = parse_tier("host=unlimited" if blocks is None else f"host={blocks * block_bytes()}")
        settings = ReplaySettings(tiers=(tier,), skip=self._warm_up if skip is None else skip)
        found = Simulation(llama(chunk, step), settings, trace.unit_tokens).run(trace)
        return Counted(found.hit_tokens, found.prompt_tokens)


@cache
def models() -> dict[str, Any]:
    """Return the peer's catalogue of models."""
    return load_models_data()


@cache
def llama(chunk: int = BLOCK, step: int = STEP_TOKENS) -> ServedModel:
    name, config = find_config("Llama-3.1-8B")
    reading = read_model(config, "auto", name=name)
    return served_model(reading, EngineSide(1, 1, "LBNHC", None), KeptSettings(step, 0, chunk, None))


def block_bytes() -> int:
    return llama().groups[0].chunk_bytes


def whole(*ids: int) -> Prompt:
    return Prompt([*ids], len(ids) * BLOCK)


def conversations(seed: int, prompts: int) -> list[Prompt]:
    """Return prompts that continue, cut or repeat earlier ones. Half of them end inside a block."""
    random, made, fresh = Random(seed), [whole()], iter(range(1, 10_000))
    for _ in range(prompts):
        earlier = random.choice(made[-12:])
        if earlier.ids and random.random() < 0.15:
            made.append(earlier)
            continue
        shared = random.randint(0, earlier.tokens // BLOCK)
        ids = earlier.ids[:shared] + [next(fresh) for _ in range(random.randint(not shared, 4))]
        rest = random.choice([0, random.randint(2, BLOCK - 1)])
        made.append(Prompt([*ids, next(fresh)] if rest else ids, len(ids) * BLOCK + rest))
    return made[1:]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.mark.parametrize("seed", range(4))
def test_both_find_the_same_tokens_at_every_capacity_that_holds_each_prompt(path: Path, seed: int) -> None:
    prompts = conversations(seed, 60)
    trace, largest = Traced(path, prompts), max(len(one.ids) for one in prompts)
    theirs = trace.peer(*range(largest, 1000, 5))
    assert len({counted.hits for counted in theirs.values()}) > 3, "the capacity has no effect"
    assert {blocks: trace.replay(blocks) for blocks in theirs} == theirs


def test_both_find_the_same_tokens_without_a_limit(path: Path) -> None:
    trace = Traced(path, conversations(9, 60))
    ceiling = trace.theirs()["ceiling"]
    assert trace.replay(None) == (ceiling["hitTokens"], ceiling["totalTokens"])
    assert ceiling["hitTokens"] > 0


def test_a_block_takes_the_same_memory(path: Path) -> None:
    assert Traced(path, [whole(1)]).theirs(1)["metadata"]["bytesPerBlock"] == block_bytes()


def test_the_peer_counts_the_second_half_of_the_prompts_and_a_replay_those_after_skip(path: Path) -> None:
    trace = Traced(path, [whole(1), whole(1, 2), whole(1, 2), whole(1, 3)])
    assert trace.peer(2) == {2: (3 * BLOCK, 4 * BLOCK)} == {2: trace.replay(2)}
    assert trace.replay(2, skip=0) == (4 * BLOCK, 7 * BLOCK)


def test_the_peer_leaves_out_a_cache_that_is_not_full_before_the_second_half(path: Path) -> None:
    trace = Traced(path, [whole(1), whole(1, 2), whole(1, 2), whole(1, 3)])
    assert trace.peer(2, 3).keys() == {2}
    assert trace.replay(3) == (3 * BLOCK, 4 * BLOCK)


def test_peer_keeps_one_block_less_than_fits_of_a_prompt_larger_than_the_cache(path: Path) -> None:
    """A replay keeps what an engine does: the chunks of each step that fit, and the latest step's at the end.

    The peer evicts the last block that it has just added to make room for the next one, and then stops.
    """
    trace = Traced(path, [whole(1, 2, 3, 4)] * 2)
    assert trace.peer(3) == {3: (2 * BLOCK, 4 * BLOCK)}
    assert trace.replay(3) == (3 * BLOCK, 4 * BLOCK)
    assert trace.replay(3, step=2 * BLOCK) == (BLOCK, 4 * BLOCK)


def test_a_prompt_of_one_token_is_a_hit_for_the_peer_and_computed_by_an_engine(path: Path) -> None:
    trace = Traced(path, [Prompt([1], 1)] * 2)
    assert trace.peer(1) == {1: (1, 1)}
    assert trace.replay(1) == (0, 1)


def test_the_peer_does_not_count_tokens_after_the_last_id(path: Path) -> None:
    trace = Traced(path, [Prompt([1], BLOCK + 5)] * 2)
    assert trace.peer(1) == {1: (BLOCK, BLOCK)}
    assert trace.replay(2) == (BLOCK, BLOCK + 5)


def test_shorter_chunks_waste_less_memory_on_an_incomplete_block(path: Path) -> None:
    short = [Prompt([number], BLOCK // 2) for number in (1, 2)]
    trace = Traced(path, [*short, *short])
    assert trace.peer(1) == {1: (0, BLOCK)} == {1: trace.replay(1)}
    assert trace.replay(1, chunk=BLOCK // 2) == (BLOCK, BLOCK)
