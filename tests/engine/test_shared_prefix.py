"""Prompts of hybrids that share only their beginning, with vLLM's own retention of snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from pathlib import Path
from typing import Any

import pytest

from kvferry.planning.retention import first_snapshot, snapshot_positions
from support.vllm_engine.inside import distance
from support.vllm_engine.marks import engines
from support.vllm_engine.pair import prompt
from support.vllm_engine.tiered import Tiered, chunk_files, spoil

OPTIONS = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "enable_prefix_caching": True}
"""One step computes a whole prompt, so vLLM by itself takes a snapshot at its end alone."""
SHARED, FIRST = 900, 256
"""Tokens of the system prompt, which end inside a block, and the position of the first snapshot."""


class Served:
    """An engine with tiers that places snapshots, and its positions in a system prompt."""

    def __init__(self, family: str, checkpoints: Path, folder: Path, first: int) -> None:
        self.family, self.directory, self._checkpoints = family, folder / "chunks", checkpoints
        # On a CPU, vLLM's kernel for Mamba2 takes no step of several blocks with prefix caching.
        steps = {"dtype": "bfloat16", "max_num_batched_tokens": 256} if family == "nemotronh" else {}
        settings = {"chunk_tokens": 32, "first_snapshot_tokens": first}
        told = (family, checkpoints, self.directory, folder / "log", {**OPTIONS, **steps}, settings)
        self.engine = Tiered(*told)
        interval = lcm(*(tokens for _, tokens, _ in self.engine.about["groups"]), 32)
        self.first = first_snapshot(FIRST, interval, 0, 0.0)
        (*_, self.last) = snapshot_positions(SHARED, 0, 0, self.first, interval)
        self.whole = SHARED // interval * interval

    def ask(self, system: list[int], user: int, *, host: bool = False, **how: Any) -> dict[str, Any]:
        """The answer to a user, by an engine that has no prefix of the system prompt itself."""
        self.engine.forget(host=host)
        return self.engine.say(system + prompt(300, user), **how)


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, running: Any, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    running.close()
    one = Served(request.param, checkpoints, tmp_path_factory.mktemp(request.param), FIRST)
    yield one
    one.engine.close()


pytestmark = engines("served", ["lfm2"], ["qwen3next", "nemotronh"])


def test_a_second_prompt_loads_half_of_a_shared_prefix_and_a_third_all_of_it(served: Served) -> None:
    system = prompt(SHARED, 60)
    hits = [served.ask(system, user)["hit"] for user in (61, 62, 63, 64)]
    assert 2 * served.last >= SHARED - served.first
    assert served.whole - served.last >= served.first, "else no snapshot is placed where prompts depart"
    assert hits == [[0], [served.last], [served.whole], [served.whole]]
    log = served.engine.log.read_text()
    assert f"snapshots of recurrent state at {served.first} tokens, at its doubles, and where" in log


def test_loaded_part_of_a_shared_prefix_is_used(served: Served) -> None:
    alone = served.ask(prompt(SHARED, 70), 72, salt="alone")
    assert alone["hit"] == [0]
    sound, again = (half_loaded(served, salt) for salt in ("sound", "again"))
    assert distance(again, sound) == 0.0
    assert distance(sound, alone) < 0.1, "it is cut at another position"
    groups = chunk_files(served.directory)
    assert len(groups) == 2, "attention and states"
    for group in groups:
        assert distance(half_loaded(served, group, spoiled=group), sound) > 1e-4, group


def half_loaded(served: Served, salt: str, *, spoiled: str | None = None) -> dict[str, Any]:
    """The answer to the second user of a system prompt, half of which comes from files.

    Args:
        served: engine.
        salt: of both users. It keeps them apart from other calls, so that all are computed in the same way.
        spoiled: group whose chunks are spoiled before the second user asks.
    """
    system = prompt(SHARED, 70)
    served.ask(system, 71, salt=salt)
    for path in chunk_files(served.directory)[spoiled] if spoiled else ():
        spoil(path, with_checksum=True)
    answer = served.ask(system, 72, host=True, salt=salt)
    assert answer["hit"] == [served.last]
    return answer


@pytest.mark.long
def test_shared_prefix_is_not_loaded_without_early_snapshots(served: Served, tmp_path: Path) -> None:
    served.engine.close()
    without = Served(served.family, served._checkpoints, tmp_path, 0)
    try:
        system = prompt(SHARED, 80)
        assert [without.ask(system, user)["hit"] for user in (81, 82, 83)] == [[0], [0], [0]]
    finally:
        without.engine.close()
    log = without.engine.log.read_text()
    assert "first_snapshot_tokens is 0, so a prompt that shares only its beginning with others" in log
