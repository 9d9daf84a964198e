"""Engines whose ranks divide the tokens of a block (decode context parallelism) hand over latents.

vLLM's backends for CPUs refuse it. Triton's interpreter runs TRITON_MLA, which does not, as in `test_triton`.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.vllm_engine import backends
from support.vllm_engine.inside import distance
from support.vllm_engine.marks import engines
from support.vllm_engine.pair import SOON, Pair, Setup, prompt
from support.vllm_engine.ranks import WITNESS

SMALL = {
    "kv_cache_memory_bytes": 8 << 20, "max_model_len": 512, "max_num_batched_tokens": 512,
    "worker_extension_cls": WITNESS,
}  # fmt: skip
TWO = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "block_size": 16}
ONE = {"block_size": 32}
NEAR = 0.02
"""How far answers of one rank and of two may be apart, which compute tokens one by one and together."""
SAME, OTHER = 1e-5, 1e-3
"""How far a pair's answer may be from its answer to the same prompt; how far at least, from a spoiled one."""
PROMPT, TOKENS = 124, 3
"""Each rank has tokens of the last block, which is the one that is spoiled."""


def _pair(label: str, prefill: dict[str, Any], decode: dict[str, Any]) -> Setup:
    return Setup("small-dsv3", label, SMALL, prefill_options=prefill, decode_options=decode)


SETUPS = (
    _pair("2x16-by-1-to-1x32", TWO, ONE),
    _pair("1x32-to-2x16-by-8", ONE, TWO | {"cp_kv_cache_interleave_size": 8}),
)
pytestmark = [
    *engines("pair", (), SETUPS),
    pytest.mark.skipif(not backends.TRITON, reason=f"{backends.VARIABLE} is not triton"),
    pytest.mark.timeout(600),
]


def test_each_rank_loads_its_tokens_and_the_answer_is_a_single_ranks(pair: Pair) -> None:
    sides = pair.setup.prefill_options, pair.setup.decode_options
    alone = pair.prefill if sides[0] is ONE else pair.decode
    ranks = sides[1].get("tensor_parallel_size", 1)
    text, answers = prompt(PROMPT, 1), []
    (reference,) = alone.call("generate", [text], tokens=TOKENS)
    for spoiled in (None, None, *range(ranks)):
        pair.decode.call("ask_ranks", "witness_loads", spoiled)
        (asked,) = pair.prefill.call("prefill", [text])
        answers += pair.decode.call("generate", [text], [asked["params"]], TOKENS)
        loads = [load for (load,) in pair.decode.call("ask_ranks", "witnessed_loads")]
        of_peer = {name: loads[0][name] for name in ("span", "tables")}
        held = pair.prefill.call("ask_ranks", "digests_held", of_peer)
        there, here = (
            by_token(each, side.get("cp_kv_cache_interleave_size", 1))
            for each, side in zip((held, [load["digests"] for load in loads]), sides, strict=True)
        )
        assert here == there
        assert {len(each) for each in here.values()} == {PROMPT - 1}
        pair.prefill.call("step", SOON)
    answer, again, *spoiled_answers = answers
    assert answer["tokens"] == reference["tokens"]
    assert distance(answer, reference) < NEAR
    assert distance(answer, again) < SAME
    assert all(distance(answer, one) > OTHER for one in spoiled_answers), "what a rank has read is not used"


def by_token(ranks: list[dict[str, list[str]]], turn: int) -> dict[str, list[str]]:
    """What ranks have that take turns of so many tokens, in the order of the prompt."""
    found = {}
    for part in ranks[0]:
        queues = [iter(of_rank[part]) for of_rank in ranks]
        count = sum(len(of_rank[part]) for of_rank in ranks)
        found[part] = [next(queues[token // turn % len(ranks)]) for token in range(count)]
    return found
