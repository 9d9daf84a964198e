"""The next turn between engines of other ranks and blocks; who asks has tiers, and callers a salt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from support.vllm_engine.inside import distance
from support.vllm_engine.pair import SOON, Pair, Setup, connector, prompt
from support.vllm_engine.ranks import WITNESS

TWO = {"tensor_parallel_size": 2, "block_size": 64}
ONE = {"block_size": 128}
NEAR = 2e-3
"""How far answers of one rank and of two may be apart: they add up in another order."""
PROMPT, ANSWER = 385, 70
"""All but the prompt's last token are whole blocks of either engine, and whole chunks; the answer moves the
window out of the block in which it began, which the decode engine has in part."""
KEPT = PROMPT + ANSWER - 1
LAYERS, HEADS = 6, 2


def between(label: str, asks: dict[str, Any], keeps: dict[str, Any]) -> Setup:
    """A pair whose prefill engine has host memory, which weighs more than a peer."""
    host = {"type": "host", "capacity": "64MiB", "load_weight": 2}
    return Setup(
        "gemma3",
        f"turns-{label}",
        {"max_num_batched_tokens": 256, "worker_extension_cls": WITNESS},
        prefill_options={
            **asks,
            "kv_transfer_config": connector(transfer=True, chunk_tokens=128, tiers=[host]),
        },
        decode_options={**keeps, "kv_transfer_config": connector(turn_seconds=600.0, turn_share=0.5)},
    )


pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.parametrize(
        "pair",
        [
            pytest.param(setup, id=str(setup))
            for setup in (between("1x128-to-2x64", TWO, ONE), between("2x64-to-1x128", ONE, TWO))
        ],
        indirect=True,
    ),
]


@pytest.fixture
def ended(pair: Pair) -> Iterator[None]:
    """Nothing is kept any more afterwards, on any rank."""
    yield
    pair.prefill.call("ask_ranks", "witness_loads", None)
    assert not pair.decode.call("reset_prefix_cache"), "blocks are in use"
    pair.decode.call("reset_connector")
    pair.decode.call("step", SOON)
    assert pair.decode.call("counters")["leases"] == 0
    assert pair.decode.call("reset_prefix_cache"), "all are free"
    assert pair.prefill.call("held") == {}


def through(pair: Pair, text: list[int], salt: str, tokens: int = 8) -> dict[str, Any]:
    """The decode engine's answer, under a salt."""
    (asked,) = pair.prefill.call("prefill", [text], salt=salt)
    (answer,) = pair.decode.call("generate", [text], [asked["params"]], tokens, salt)
    pair.prefill.call("settle_tiers")
    pair.prefill.call("step", SOON)
    pair.decode.call("step", SOON)
    return answer


def next_turn(pair: Pair, seed: int) -> tuple[list[int], list[dict[str, Any]]]:
    """The prompt of a second turn, after the first, and what each engine says to it by itself."""
    first = prompt(PROMPT, seed)
    text = first + through(pair, first, "ours", ANSWER)["tokens"] + prompt(60, seed)
    alone = [engine.call("generate", [text], salt="alone")[0] for engine in (pair.prefill, pair.decode)]
    pair.prefill.call("settle_tiers")
    assert pair.prefill.call("reset_prefix_cache")
    pair.prefill.call("new_loads")
    return text, alone


def grown(pair: Pair, before: dict[str, float]) -> dict[str, float]:
    """What the prefill engine has counted of queries since then."""
    now = Counter(pair.prefill.call("counted")) - Counter(before)
    return {name: n for name, n in now.items() if name.startswith(("hit", "miss", "queries"))}


def heads(digests: list[dict[str, list[str]]]) -> dict[str, list[str]]:
    """What several ranks have, none of which has what another one has."""
    every: dict[str, list[str]] = {}
    for of_rank in digests:
        assert every.keys().isdisjoint(of_rank), "a head is on two ranks"
        every |= of_rank
    return every


@pytest.mark.usefixtures("ended")
def test_prompt_comes_from_host_memory_and_its_answer_from_the_peer(pair: Pair) -> None:
    pair.prefill.call("wait_for_turns", SOON)
    ranks = pair.setup.prefill_options.get("tensor_parallel_size", 1)
    for spoiled in (None, *range(ranks)):
        text, alone = next_turn(pair, PROMPT if spoiled is None else spoiled)
        pair.prefill.call("ask_ranks", "witness_loads", spoiled)
        before = pair.prefill.call("counted")
        answer = through(pair, text, "ours")
        assert pair.prefill.call("new_loads") == [("tiers", 0, PROMPT - 1), ("peer", PROMPT - 1, KEPT)]
        assert grown(pair, before) == {
            "queries peer": 1,
            "queries tiers": 1,
            "hits peer": 1,
            "hits tiers": 1,
            "hit_tokens tiers host": PROMPT - 1,
            "hit_tokens peer peer": ANSWER,
        }
        loads = [load for (load,) in pair.prefill.call("ask_ranks", "witnessed_loads")]
        of_peer = {name: loads[0][name] for name in ("span", "tables")}
        there = heads(pair.decode.call("ask_ranks", "digests_held", of_peer))
        assert heads([load["digests"] for load in loads]) == there
        assert len(there) == LAYERS * HEADS * 2, "keys and values"
        assert max(map(len, there.values())) == ANSWER
        for reference in alone:
            if spoiled is None:
                assert answer["tokens"] == reference["tokens"]
                assert distance(answer, reference) < NEAR
            else:
                assert distance(answer, reference) > 10 * NEAR, "what a rank has read is not used"


@pytest.mark.usefixtures("ended")
def test_turn_is_not_found_with_another_salt(pair: Pair) -> None:
    pair.prefill.call("wait_for_turns", SOON)
    text, alone = next_turn(pair, 10)
    before = pair.prefill.call("counted")
    answer = through(pair, text, "theirs")
    assert pair.prefill.call("new_loads") == []
    assert grown(pair, before) == {
        "queries peer": 1,
        "queries tiers": 1,
        "misses peer not_stored ": 1,
        "misses tiers not_stored several": 1,
    }
    assert answer["tokens"] == alone[0]["tokens"]
    assert distance(answer, alone[0]) < NEAR
