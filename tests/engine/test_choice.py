"""Several sources have something: weights decide, or what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.vllm_engine.both import Both, loads
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import prompt
from support.vllm_engine.tiered import Tiered

pytestmark = [pytest.mark.engine, pytest.mark.family]


@pytest.fixture(scope="module")
def both(running: object, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    running.close()
    folder = tmp_path_factory.mktemp("weights")
    pair = Both((folder / "one", folder / "two"), folder, checkpoints, load_weight=0.5)
    yield pair
    pair.close()


@pytest.mark.parametrize(("kept", "length", "peer"), [(512, 700, False), (256, 701, True)])
def test_a_peer_that_weighs_half_serves_what_is_more_than_twice_as_long(
    both: Both, kept: int, length: int, peer: bool
) -> None:
    text = prompt(length, length)
    (reference,) = both.reference([text])
    both.decode.call("generate", [text[:kept]])
    both.forget(host=True)
    loads(both.decode)
    (answer,) = both.through([text])
    assert loads(both.decode) == [length - 1 if peer else kept]
    assert bool(answer["moved"]) == peer
    assert answer["tokens"] == reference["tokens"]
    assert distance(answer, reference) < 1e-4
    both.nothing_held()


def test_by_cost_a_disk_that_turned_out_slow_is_not_waited_for_and_memory_is_used(
    checkpoints: Path, running: object, tmp_path: Path
) -> None:
    running.close()
    text, more = prompt(512, 1), prompt(512, 2)
    engine = Tiered("qwen3", checkpoints, tmp_path / "kv", tmp_path / "log", settings={"policy": "cost"})
    try:
        reference = engine.say(text)
        engine.say(more)
        engine.engine.call("slow_files", 2.0)
        engine.forget(host=True)
        assert engine.say(text)["hit"] == [len(text)], "nothing is known of the disk: it is tried"
        engine.forget()
        assert engine.say(text)["hit"] == [len(text)], "what it gave is in memory now"
        engine.forget(host=True)
        answer = engine.say(text)
        assert answer["hit"] == [0], "computing is faster"
        assert distance(answer, reference) < 1e-4
    finally:
        engine.close()
