"""Engines that speculate: what moves of a draft model, and answers that do not depend on it.

Not with recurrent layers: with drafts, one engine of vLLM's CPU build, without any connector, gives other
answers than without drafts. What is kept of those is shown over vLLM's cache manager, in
`unit/engines/test_speculation_in_vllm.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.vllm_engine.checkpoints import MODULES
from support.vllm_engine.drafts import TOKENS
from support.vllm_engine.inside import distance
from support.vllm_engine.marks import families, with_second_runner
from support.vllm_engine.pair import Pair, Setup, prompt
from support.vllm_engine.runners import RUNNER

SHORT_STEPS = {"max_num_batched_tokens": 256}


def speculating(family: str, prefill: str, decode: str, *, asynchronous: bool = False) -> Setup:
    """A pair whose engines speculate by these methods of `support.vllm_engine.drafts`."""
    label = f"{prefill or 'no draft'} to {decode or 'no draft'}".replace(" ", "-")
    return Setup(family, label, SHORT_STEPS, drafts=(prefill, decode), asynchronous=asynchronous)


MOVED = speculating("llama", "itself", "itself")
MADE_HERE = speculating("gemma3", "", "eagle", asynchronous=True)
THREE_MODULES = speculating("mimo3", "mtp", "mtp")
"""vLLM's second runner runs every module, and vLLM's MiMo raises an error for all but the first."""
SETUPS = (
    MOVED,
    MADE_HERE,
    speculating("llama", "itself", ""),
    speculating("llama", "", "itself"),
    speculating("llama", "eagle", "eagle"),
    speculating("llama", "eagle", "", asynchronous=True),
    speculating("llama", "eagle", "other eagle"),
    speculating("gemma3", "eagle", "eagle", asynchronous=True),
    speculating("gemma3", "eagle", ""),
    speculating("gptoss", "eagle", "eagle"),
    speculating("gptoss", "", "eagle"),
    speculating("qwen3", "ngram", "ngram"),
    speculating("qwen3", "ngram", ""),
    speculating("gemma3", "", "ngram"),
    speculating("gemma3", "ngram", "ngram"),
    speculating("mimo", "", "mtp"),
    speculating("mimo", "mtp", ""),
    *((THREE_MODULES,) if RUNNER == "1" else ()),
)
pytestmark = pytest.mark.engine
drafts_move = families("pair", SETUPS, str(MOVED))
drafts_move_or_not = families("pair", SETUPS, str(MOVED), *with_second_runner(str(MADE_HERE)))
drafts_do_not_move = families("pair", SETUPS, *with_second_runner(str(MADE_HERE)))
REPEATED = prompt(45, 20) * 5
"""N-grams draft what follows from what went before."""
LONG = 24
CLOSE = 1e-4
"""How far logprobs may be apart: several tokens at once are rounded otherwise than one by one."""


def agree(answer: dict[str, Any], reference: dict[str, Any]) -> None:
    assert answer["tokens"] == reference["tokens"]
    assert distance(answer, reference) < CLOSE


def moves_drafts(pair: Pair) -> bool:
    before, after = pair.setup.drafts
    return before == after and before not in ("", "ngram")


def offered(pair: Pair, tokens: int) -> int:
    """How many tokens of a prompt the prefill engine offers: those that all modules have seen enough for."""
    several = pair.setup.drafts[0] == "mtp" and MODULES[pair.setup.family] > 1
    return max(tokens - (TOKENS if several else 1), 0)


def draft_layers(engine: Any) -> list[str]:
    return engine.call("draft_layers")


@drafts_move_or_not
def test_connector_knows_the_layers_of_a_draft_model(pair: Pair) -> None:
    for engine, method in zip((pair.prefill, pair.decode), pair.setup.drafts, strict=True):
        drafts = draft_layers(engine)
        of_model = sum(map(len, engine.call("layers"))) - len(drafts)
        modules = MODULES.get(pair.setup.family, 0)
        expected = {"": 0, "ngram": 0, "itself": of_model, "eagle": 1, "other eagle": 1, "mtp": modules}
        assert len(drafts) == expected[method]


@drafts_move_or_not
def test_answer_equals_a_single_engines(pair: Pair) -> None:
    texts = [prompt(n, n) for n in (2, 40, 129, 300)] + [REPEATED]
    for text in texts:
        answer = pair.through([text], LONG)[0]
        tokens = answer["offer"].get("remote_num_tokens", 0)
        assert tokens == offered(pair, len(text))
        assert bool(answer["moved"]) == bool(tokens), f"{len(text)} tokens: nothing was loaded"
        drafts = set(draft_layers(pair.decode))
        if len(text) > 2:
            moved = {part for part in answer["moved"] if any(name in part for name in drafts)}
            assert bool(moved) == moves_drafts(pair)
        agree(answer, pair.reference([text], LONG)[0])
        pair.forget()


@drafts_move
def test_drafts_are_accepted_as_after_a_local_prefill(pair: Pair) -> None:
    if not pair.setup.drafts[1]:
        pytest.skip("the decode engine does not speculate")
    pair.through([prompt(30, 1)], LONG)
    pair.forget()
    pair.decode.call("drafts")
    pair.decode.call("generate", [REPEATED], tokens=LONG)
    alone = pair.decode.call("drafts")
    assert pair.decode.call("reset_prefix_cache")
    pair.through([REPEATED], LONG)
    moved = pair.decode.call("drafts")
    pair.forget()
    assert alone[0]
    assert moved[0]
    if pair.setup.drafts[1] == "itself":
        assert alone[1] > LONG // 2, (
            "the model does not agree with itself, so nothing would be seen of its cache"
        )
        assert (moved[1] > LONG // 2) == moves_drafts(pair), (alone, moved)


@drafts_move
def test_drafts_equal_those_after_a_local_prefill(pair: Pair) -> None:
    unseen = pair.setup.asynchronous and RUNNER == "1"
    if unseen or not draft_layers(pair.decode):
        pytest.skip("the scheduler does not see what is drafted, or no draft keeps a cache")
    pair.decode.call("proposals")
    pair.decode.call("generate", [REPEATED], tokens=LONG)
    alone = pair.decode.call("proposals")
    assert pair.decode.call("reset_prefix_cache")
    pair.through([REPEATED], LONG)
    moved = pair.decode.call("proposals")
    pair.forget()
    assert alone
    assert (moved == alone) == moves_drafts(pair)


@drafts_do_not_move
def test_load_clears_draft_layers_that_the_peer_lacks(pair: Pair) -> None:
    drafts = draft_layers(pair.decode)
    if not drafts or moves_drafts(pair):
        pytest.skip("every layer of the decode engine is loaded")
    text = prompt(300, 3)
    pair.decode.call("fill_drafts", 1e4)
    answer = pair.through([text], LONG)[0]
    assert pair.decode.call("left_in_drafts") == [0.0] * len(drafts)
    agree(answer, pair.reference([text], LONG)[0])
    pair.decode.call("fill_drafts", 0.0)
    pair.forget()


@drafts_move
def test_draft_layers_hold_the_end_of_a_prompt_as_a_longer_prompt_leaves_it(pair: Pair) -> None:
    if not draft_layers(pair.prefill):
        pytest.skip("the prefill engine keeps no draft's layers")
    text = prompt(150, 4)
    found = []
    for given in (text, text + prompt(1, 5)):
        (answer,) = pair.prefill.call("prefill", [given])
        tables = pair.prefill.call("granted", answer["params"])
        found.append(pair.prefill.call("of_drafts", tables, len(text) - 1))
        pair.prefill.call("release_all")
        assert pair.prefill.call("reset_prefix_cache")
    assert found[0] == found[1]


@drafts_move
def test_spoiled_block_of_any_group_changes_the_answer(pair: Pair) -> None:
    text = prompt(min(60, pair.about["block_size"]), 11)
    sound = pair.through([text])[0]
    pair.forget()
    drafts = set(draft_layers(pair.decode))
    for group, names in enumerate(pair.decode.call("layers")):
        if set(names) <= drafts:
            continue
        assert distance(pair.spoiled(text, group), sound) > 10 * CLOSE, f"group {group}"


@drafts_move
def test_prompts_with_a_local_prefix_load_only_the_rest(pair: Pair) -> None:
    if pair.setup.family == "gptoss":
        pytest.skip("vLLM finds no prefix where an EAGLE draft has a group of its own")
    start = prompt(400, 13)
    pair.decode.call("generate", [start])
    texts = [start + prompt(n, n) for n in (1, 30, 130)]
    answers = pair.through(texts, LONG)
    for text, answer in zip(texts, answers, strict=True):
        tokens = max(map(len, answer["moved"].values()))
        assert 0 < tokens < len(text) - 256
        agree(answer, pair.reference([text], LONG)[0])
    pair.forget()


@drafts_move
def test_answer_shorter_than_its_drafts_is_right_and_leaves_nothing(pair: Pair) -> None:
    text = prompt(200, 12)
    answer = pair.through([text], TOKENS - 1)[0]
    agree(answer, pair.reference([text], TOKENS - 1)[0])
    pair.forget()
    for engine in (pair.prefill, pair.decode):
        assert engine.call("counters") == {"leases": 0, "expired": 0, "pins": 0, "pulls": 0}
