"""The next turn of a conversation: the prefill engine reads the last answer from the engine that decoded it."""

from __future__ import annotations

from typing import Any

import pytest

from support.vllm_engine.inside import distance
from support.vllm_engine.pair import Pair, Setup, connector, prompt

NO_CACHE = {"enable_prefix_caching": False}
SHORT_STEPS = {"max_num_batched_tokens": 256}
ANSWER = 40


def keeping(family: str, label: str, options: dict[str, Any], **more: Any) -> Setup:
    """A pair whose decode engine keeps turns."""
    keeps = {"kv_transfer_config": connector(turn_seconds=600.0, turn_share=0.5)}
    return Setup(family, f"turns-{label}", options, decode_options=keeps, **more)


pytestmark = [
    pytest.mark.engine,
    pytest.mark.parametrize(
        "pair",
        [
            pytest.param(setup, id=str(setup), marks=marks)
            for setup, *marks in (
                [keeping("gemma3", "cached", SHORT_STEPS, exact=True)],
                [keeping("nemotronh", "uncached", {**NO_CACHE, **SHORT_STEPS})],
                [keeping("gptoss", "cached", SHORT_STEPS), pytest.mark.family],
                [keeping("dsv3", "cached", {}), pytest.mark.family],
                [keeping("qwen3next", "cached", SHORT_STEPS), pytest.mark.family],
                [keeping("lfm2", "uncached", {**NO_CACHE, **SHORT_STEPS}), pytest.mark.family],
            )
        ],
        indirect=True,
    ),
]


def test_the_last_answer_is_read_from_the_engine_that_decoded_it(pair: Pair) -> None:
    first, more = prompt(300, 300), prompt(60, 60)
    (said,) = pair.reference([first], ANSWER)
    second = first + said["tokens"] + more
    (reference,) = pair.reference([second])

    pair.prefill.call("new_loads")
    (answer,) = pair.through([first], ANSWER)
    assert answer["tokens"] == said["tokens"]
    assert pair.prefill.call("new_loads") == []
    pair.decode.call("step", 0.2)
    print(pair.prefill.call("counters"), pair.decode.call("counters"))
    for spoiled in (None, 0):
        pair.prefill.call("reset_prefix_cache")
        pair.prefill.call("spoil", spoiled)
        (answer,) = pair.through([second])
        loads = pair.prefill.call("new_loads")
        print(loads, distance(answer, reference))
        pair.prefill.call("spoil", None)
    assert 0
