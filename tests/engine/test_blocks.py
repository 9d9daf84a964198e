"""Blocks of 800 and of 1,568 tokens, which have cells of 32 in common, from either engine to the other."""

from __future__ import annotations

import pytest

from support.vllm_engine.inside import distance
from support.vllm_engine.pair import Pair, Setup, prompt

BLOCKS = (800, 1568)
OPTIONS = {"max_model_len": 4096, "max_num_batched_tokens": 256}
UNLIKE = {"prefill_options": {"block_size": BLOCKS[0]}, "decode_options": {"block_size": BLOCKS[1]}}
LENGTHS = (60, 801, 1569, 2500)
"""In one block; one token past the end of a block, of either engine; past the ends of several."""
pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.parametrize(
        "pair",
        [
            pytest.param(Setup("qwen3next", "800-1568", OPTIONS, **UNLIKE), id="qwen3next"),
            pytest.param(Setup("gemma3", "800-1568", OPTIONS, **UNLIKE), id="gemma3", marks=pytest.mark.long),
        ],
        indirect=True,
    ),
]


@pytest.fixture(params=["800-to-1568", "1568-to-800"])
def way(request: pytest.FixtureRequest, pair: Pair) -> Pair:
    """The pair, or the same engines in each other's place."""
    assert (pair.about["block_size"], pair.about_decode["block_size"]) == BLOCKS
    return pair if request.param == "800-to-1568" else pair.turned()


@pytest.mark.parametrize("length", LENGTHS)
def test_content_equals_the_producers_and_the_answer_a_single_engines(way: Pair, length: int) -> None:
    text, said = way.own_words(prompt(length - 1, length))
    way.decode.call("poison")
    answer = way.through([text])[0]
    assert answer["moved"], "nothing was loaded"
    assert answer["tokens"] == said["tokens"]
    assert distance(answer, said) == 0.0
    way.forget()


def test_spoiled_block_of_any_group_changes_the_answer(way: Pair) -> None:
    text = prompt(900, 11)
    sound = way.through([text])[0]
    way.forget()
    for group in range(len(way.about_decode["groups"])):
        assert distance(way.spoiled(text, group), sound) > 1e-4, (
            f"group {group}: the answer does not depend on what was moved"
        )
