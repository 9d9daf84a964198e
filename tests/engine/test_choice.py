"""Several sources have something: weights decide, or what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.vllm_engine.both import Both, loads
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import SOON, prompt
from support.vllm_engine.tiered import Tiered, chunk_files, spoil

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def both(running: object, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    running.close()
    folder = tmp_path_factory.mktemp("weights")
    pair = Both((folder / "one", folder / "two"), folder, checkpoints, load_weight=0.5)
    yield pair
    pair.close()


def test_lighter_peer_brings_the_end_of_a_prefix_that_the_tiers_begin(both: Both) -> None:
    """Layers with windows get everything from the peer, since they need nothing of the beginning."""
    both.through([prompt(100, 1)])  # they have met
    for number, spoiled in enumerate(("", "", "the beginning", "the end")):
        text = prompt(700, 700 + number)
        (reference,) = both.reference([text])
        both.decode.call("generate", [text[:512]])
        both.forget(host=number > 0)
        if spoiled == "the beginning":
            for path in chunk_files(both.folders[1])["full_attention"]:
                spoil(path, with_checksum=True)
        both.decode.call("spoil", 5 if spoiled == "the end" else None)
        both.decode.call("new_loads")
        loads(both.decode)
        (answer,) = both.through([text])
        assert loads(both.decode) == [699]
        assert both.decode.call("new_loads") == [("tiers", 0, 512), ("peer", 512, 699)]
        if spoiled:
            assert distance(answer, reference) > 1e-2, f"{spoiled} is not used"
        else:
            assert answer["moved"], "what the peer gave was compared"
            assert answer["tokens"] == reference["tokens"]
            assert distance(answer, reference) < 1e-4
        both.decode.call("spoil", None)
        both.nothing_held()


def test_engine_with_answers_of_one_token_learns_its_compute_speed(both: Both) -> None:
    both.prefill.call("learned")
    both.through([prompt(200, 740)])  # in one step of the prefill engine, with which it ends
    rate, under_way = both.prefill.call("learned")
    assert 200 / 60 < rate < 200 / 1e-4
    assert under_way == 0
    both.nothing_held()


def test_failed_part_of_the_peer_ends_the_wait_for_slow_tiers(both: Both) -> None:
    text = prompt(700, 720)
    (reference,) = both.reference([text])
    both.decode.call("generate", [text[:512]])
    both.forget(host=True)
    both.decode.call("slow_files", 2.0)  # from here on
    (offer,) = [answer["params"] for answer in both.prefill.call("prefill", [text])]
    tables = both.prefill.call("granted", offer)
    offer = both.prefill.call("regrant", offer, {"tables": [[10**6] * len(table) for table in tables]})
    both.decode.call("new_loads")
    (answer,) = both.decode.call("generate", [text], [offer])
    assert both.decode.call("new_loads") == [("tiers", 0, 512), ("peer", 512, 699), ("tiers", 0, 512)]
    given_up = r"The load is dropped after [\d.]+ m?s: another part of the prefix has failed\."
    assert any(re.fullmatch(given_up, line) for line in both.decode.call("story_of_last"))
    assert answer["tokens"] == reference["tokens"]
    assert distance(answer, reference) < 1e-4
    both.prefill.call("step", SOON)
    both.nothing_held()


def test_policy_cost_skips_a_slow_disk_and_uses_memory(
    checkpoints: Path, running: object, tmp_path: Path
) -> None:
    running.close()
    text, more = prompt(512, 1), prompt(512, 2)
    by_cost = {"source_policy": "cost"}
    engine = Tiered("qwen3", checkpoints, tmp_path / "kv", tmp_path / "log", settings=by_cost)
    try:
        engine.engine.call("slow_prompts", 0.3)  # a tiny model computes as fast as memory gives
        reference = engine.say(text)
        engine.say(more)
        engine.engine.call("slow_files", 4.0)
        engine.forget(host=True)
        assert engine.say(text)["hit"] == [len(text)], "nothing is known of the disk: it is tried"
        engine.forget()
        assert engine.say(text)["hit"] == [len(text)], "what it gave is in memory now"
        engine.forget(host=True)
        answer = engine.say(text)
        assert answer["hit"] == [0], "computing is faster"
        assert distance(answer, reference) < 1e-4
        puts = engine.engine.call("tier_stats")[0]["puts"]
        engine.forget()
        assert engine.say(text)["hit"] == [len(text)], "what was computed is in memory, as what was loaded is"
        assert engine.engine.call("tier_stats")[0]["puts"] == puts, "the disk has it"
    finally:
        engine.close()
