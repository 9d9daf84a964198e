"""A pair whose READs go over TCP hands KV over through host memory that both engines map."""

from __future__ import annotations

import pytest

from support.vllm_engine.inside import distance
from support.vllm_engine.pair import Pair, Setup, prompt

OVER_TCP = {"environment": {"UCX_TLS": "tcp,self"}}
OPTIONS = {"max_num_batched_tokens": 256}
UNLIKE = {"prefill_options": {"block_size": 64}, "decode_options": {"block_size": 128}}
pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.parametrize(
        "pair",
        [
            pytest.param(Setup("gemma3", "shared", OPTIONS, **OVER_TCP), id="gemma3"),
            pytest.param(Setup("qwen3", "shared-64-128", OPTIONS, **OVER_TCP, **UNLIKE), id="qwen3"),
        ],
        indirect=True,
    ),
]


def test_memory_is_shared_where_reads_are_slow_and_the_answer_is_a_single_engines(pair: Pair) -> None:
    for length in (300, 700):
        text, said = pair.own_words(prompt(length - 1, length))
        pair.decode.call("poison")
        answer = pair.through([text])[0]
        assert answer["moved"], "nothing was loaded"
        assert answer["tokens"] == said["tokens"]
        assert distance(answer, said) == 0.0
        pair.forget()
    counted = pair.decode.call("counted")
    # A window may be so small that asking for it takes longer than its READ.
    assert any(name.endswith("full_attention shared") for name in counted), counted
    assert 0 < counted["read_bytes_per_second shared"] < 5e9


def test_a_spoiled_block_of_any_group_changes_the_answer(pair: Pair) -> None:
    text = prompt(60, 11)
    sound = pair.through([text])[0]
    pair.forget()
    for group in range(len(pair.about_decode["groups"])):
        assert distance(pair.spoiled(text, group), sound) > 1e-4, (
            f"group {group}: the answer does not depend on what was moved"
        )
