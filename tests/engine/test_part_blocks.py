"""A window's first block, of which a producer with smaller blocks has only the end."""

from __future__ import annotations

import pytest

from support.vllm_engine.inside import distance
from support.vllm_engine.pair import Pair, Setup, prompt

# A window of 64 tokens. The last of 300 sees those from 236 on: a producer with blocks of 32 has them from
# 224 on, which is the end of the consumer's block [128, 256).
PARTS = Setup("gemma3", "parts", prefill_options={"block_size": 32}, decode_options={"block_size": 128})

pytestmark = [pytest.mark.engine, pytest.mark.parametrize("pair", [PARTS], ids=str, indirect=True)]


def test_a_prompt_that_ends_where_the_block_does_is_not_served_from_it(pair: Pair) -> None:
    text = prompt(300, 1)
    other = text[:256] + prompt(20, 2)
    (sound,) = pair.decode.call("generate", [other])
    pair.forget()
    assert pair.through([text])[0]["moved"]
    (answer,) = pair.decode.call("generate", [other])
    assert distance(answer, sound) <= 1e-5
