"""Two engines in one process, and a cache that only the engine's own copy operation reaches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.tools.serving.tiny import FAMILIES, tiny_checkpoint
from support.vllm_engine.inside import distance
from support.vllm_engine.marks import families
from support.vllm_engine.pair import SOON, Pair, Setup, connector, prompt
from support.vllm_engine.process import Engine

pytestmark = pytest.mark.engine


@pytest.mark.long
def test_two_engines_in_one_process_hand_over_to_each_other(
    running: object, checkpoints: Path, tmp_path: Path
) -> None:
    running.close()
    model = str(tiny_checkpoint("gemma3", checkpoints))
    options = {"model": model, **FAMILIES["gemma3"].engine_options(), "kv_cache_memory_bytes": 32 << 20}
    traces = [tmp_path / "one.jsonl", tmp_path / "other.jsonl"]
    first, second = (connector(record=str(path)) for path in traces)
    both = Engine(tmp_path / "both.log", **options, kv_transfer_config=first)
    answers: list[dict[str, Any]] = []
    try:
        both.ready()
        both.call("start_another", {**options, "kv_transfer_config": second})
        for text in (prompt(300, 1), prompt(129, 2)):
            reference = both.call("generate", [text])[0]
            both.call("reset_prefix_cache")
            offered = both.call("prefill", [text])[0]
            offer = offered["params"]
            answer = both.call("other", "generate", [text], [offer])[0]
            loaded = both.call("other", "loaded")
            theirs = both.call("digests_of_offer", offer)
            assert list(loaded.values()) == [theirs]
            assert answer["tokens"] == reference["tokens"]
            both.call("step", SOON)
            assert both.call("requests_left") == 0
            both.call("other", "spoil", 5)
            again = both.call("prefill", [text])[0]
            offer = again["params"]
            both.call("other", "reset_prefix_cache")
            spoiled = both.call("other", "generate", [text], [offer])[0]
            answers += [reference, offered, again]
            both.call("other", "spoil", None)
            both.call("other", "loaded")
            assert spoiled["logprobs"][0] != reference["logprobs"][0]
            both.call("step", SOON)
            both.call("reset_prefix_cache")
            both.call("other", "reset_prefix_cache")
        counted = both.call("other", "counted")
    finally:
        both.close()
    tickets = {name: n for name, n in counted.items() if name.startswith("tickets")}
    assert tickets == {"tickets hit": 4}, "the first one met a producer that it did not know"
    prefills, decodes = map(recorded, traces)
    assert [line["local_tokens"] for line in prefills] == [answer["cached"] for answer in answers]
    assert prefills[2]["local_tokens"] > prefills[1]["local_tokens"] == 0, "it has been computed before"
    assert not any(line["loaded"] for line in prefills)
    # The text of a decode request has a token more than its prefill request.
    assert [line["prompt_tokens"] for line in prefills] == [300, 299, 299, 129, 128, 128]
    assert [line["loaded"] for line in decodes] == [{"peer": n} for n in (299, 299, 128, 128)]
    assert [(line["local_tokens"], line["prompt_tokens"]) for line in decodes[::2]] == [(0, 300), (0, 129)]
    assert prefills[0]["keys"] == decodes[0]["keys"]


def recorded(path: Path) -> list[dict[str, Any]]:
    """The requests that an engine has recorded."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


DEVICE = {"test_device": True, "max_num_batched_tokens": 256}
HOST_BUFFER = [
    Setup(
        "gemma3",
        "host-buffer-64-128",
        DEVICE,
        connector={"host_buffer": True},
        prefill_options={"block_size": 64},
        # Each block is four of the device's.
        decode_options={"block_size": 128, "kernel_tokens": 32},
    ),
    Setup(
        "nemotronh",
        "host-buffer",
        {**DEVICE, "enable_prefix_caching": False},
        connector={"host_buffer": True},
    ),
]


@pytest.fixture(params=["forth", pytest.param("back", marks=pytest.mark.long)])
def way(request: pytest.FixtureRequest, pair: Pair) -> Pair:
    """The pair, or the same engines in each other's place."""
    return pair if request.param == "forth" else pair.turned()


@families("pair", HOST_BUFFER, str(HOST_BUFFER[0]))
def test_an_unregistered_cache_goes_through_host_memory(way: Pair) -> None:
    assert not way.prefill.call("registered_is_the_cache")
    assert not way.decode.call("registered_is_the_cache")
    for length in (40, 256, 600):
        text, said = way.own_words(prompt(length - 1, length))
        way.decode.call("poison")
        answer = way.through([text])[0]
        assert answer["moved"]
        assert answer["tokens"] == said["tokens"]
        assert distance(answer, said) == 0.0
        way.forget()
    text = prompt(60, 11)
    sound = way.through([text])[0]
    way.forget()
    for group in range(len(way.about_decode["groups"])):
        assert distance(way.spoiled(text, group), sound) > 1e-4, f"group {group}"
