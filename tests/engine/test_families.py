"""Every family, prefilled by one engine, decoded by another: the bytes, the answers, and that they matter.

Half of the engines schedule asynchronously, as vLLM does on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.tools.serving.router.bodies import ASK_FOR_KV
from support.vllm_engine.inside import distance
from support.vllm_engine.lengths import limit_admissions, of_each_length, through
from support.vllm_engine.marks import families, with_second_runner
from support.vllm_engine.pair import SOON, TEXTS, TOGETHER, Pair, Setup, prompt

NO_CACHE = {"enable_prefix_caching": False}
SHORT_STEPS = {"max_num_batched_tokens": 256}
WINDOWS = Setup("gemma4", options=SHORT_STEPS, exact=True, asynchronous=True)
# vLLM's Mamba2 for CPUs caches prefixes if no step of prefill goes past the end of a block.
STATES = Setup("nemotronh", "cached", {"enable_prefix_caching": True, "max_num_batched_tokens": 128})
LATENTS = Setup("dsv3", asynchronous=True)
WHOLE_PAGES = Setup("dsv4")
SETUPS = (
    WINDOWS,
    STATES,
    LATENTS,
    Setup("nemotronh", options={**NO_CACHE, **SHORT_STEPS}),
    Setup("qwen3", options=SHORT_STEPS, exact=True),
    Setup("qwen3", "uncached", {**NO_CACHE, **SHORT_STEPS}, exact=True, asynchronous=True),
    Setup("gemma3", options=SHORT_STEPS, exact=True),
    Setup("gemma3", "uncached", {**NO_CACHE, **SHORT_STEPS}, exact=True),
    Setup("gemma3", "one-group", {**SHORT_STEPS, "disable_hybrid_kv_cache_manager": True}, exact=True),
    Setup("gptoss", options=SHORT_STEPS, asynchronous=True),
    Setup("llama4", options=SHORT_STEPS, asynchronous=True),
    Setup("dsv2"),
    Setup("qwen3next", options=SHORT_STEPS, asynchronous=True),
    Setup("qwen3next", "uncached", {**NO_CACHE, **SHORT_STEPS}),
    Setup("qwen3_5", options=SHORT_STEPS, asynchronous=True),
    Setup("qwen3_5", "uncached", {**NO_CACHE, **SHORT_STEPS}),
    Setup(
        "nemotronh",
        "cached-bfloat16",
        {"enable_prefix_caching": True, "dtype": "bfloat16", "max_num_batched_tokens": 256},
        asynchronous=True,
    ),
    Setup("lfm2", options=SHORT_STEPS),
    Setup("lfm2", "uncached", {**NO_CACHE, **SHORT_STEPS}, asynchronous=True),
    *with_second_runner(WHOLE_PAGES),
)
pytestmark = pytest.mark.engine
every_kind = families("pair", SETUPS, *map(str, (WINDOWS, STATES, LATENTS)))
with_windows = families("pair", SETUPS, str(WINDOWS))
with_states = families("pair", SETUPS, str(STATES))


@every_kind
def test_content_of_pages_is_claimed_only_if_proved(pair: Pair) -> None:
    right, wrong = ("latent", "packed_kv") if pair.setup.family.startswith("dsv") else ("cpu_kv", "packed_kv")
    for kind, content, fields in pair.decode.call("contents"):
        if pair.setup == WHOLE_PAGES:
            assert [name.partition(" ")[0] for name in fields] == ["opaque"], content
        elif kind == "state":
            assert fields, content
            assert all(name.startswith(("ssm", "conv")) for name in fields), fields
        else:
            assert fields == (["latent"] if right == "latent" else ["k", "v"])
    if right == "cpu_kv":
        assert all(pair.decode.call("believed_if_it_were", wrong)), (
            "the probe believes an adapter that is wrong"
        )


@every_kind
def test_bytes_equal_the_producers_and_the_answer_a_single_engines(pair: Pair) -> None:
    for start in TEXTS:
        text, reference = pair.own_words(start)
        answer = pair.through([text])[0]
        assert answer["moved"], f"{len(start)} tokens: nothing was loaded"
        assert answer["offer"]["remote_num_tokens"] == len(start)
        assert distance(answer, reference) == 0.0, f"{len(start)} tokens: not what a single engine says"
        pair.forget()


@with_windows
def test_cache_shared_by_two_layers_moves_once(pair: Pair) -> None:
    if pair.setup.family != "gemma4":
        pytest.skip("each layer of this family has its own cache")
    moved = pair.through([prompt(90, 3)])[0]["moved"]
    assert {name.split("/")[0] for name in moved} == {f"model.layers.{n}.self_attn.attn" for n in range(4)}
    pair.forget()


@of_each_length
@with_windows
def test_prompt_of_any_length_gets_the_same_answer_again(
    pair: Pair, texts_of: Callable[[int, int], list[list[int]]]
) -> None:
    if not pair.setup.exact:
        pytest.skip("answers depend on what is computed beside them")
    texts = texts_of(pair.about["block_size"], 50_000)
    for engine in (pair.prefill, pair.decode):
        limit_admissions(engine)
    references = pair.prefill.call("generate", texts, tokens=2)
    pair.forget()
    for _ in range(2):
        answers = through(pair, texts)
        for text, answer, reference in zip(texts, answers, references, strict=True):
            assert bool(answer["moved"]) == (len(text) > 1), f"{len(text)} tokens"
            assert distance(answer, reference) < 1e-4, f"{len(text)} tokens"
        pair.forget()


@with_windows
def test_finished_requests_hold_nothing(pair: Pair) -> None:
    free = pair.prefill.call("free_blocks"), pair.decode.call("free_blocks")
    pair.through([prompt(300, 1)])
    assert pair.prefill.call("requests_left") == 0
    assert pair.prefill.call("counters")["leases"] == 0
    assert pair.decode.call("counters") == {"leases": 0, "expired": 0, "pins": 0, "pulls": 0}
    assert (pair.prefill.call("free_blocks"), pair.decode.call("free_blocks")) == free
    pair.forget()


@with_windows
def test_samples_of_one_prompt_are_handed_over_once_and_leave_no_lease(pair: Pair) -> None:
    """As through a router that asks both engines for all samples."""
    text, reference = pair.own_words(prompt(300, 12))
    free = pair.prefill.call("free_blocks"), pair.decode.call("free_blocks")
    offer = pair.prefill.call("samples", text, ASK_FOR_KV, 3, 1)["params"]
    assert offer["remote_num_tokens"] == len(text) - 1
    assert pair.prefill.call("counters")["leases"] == 1
    theirs = pair.prefill.call("digests_of_offer", offer)
    pair.decode.call("loaded")
    said = pair.decode.call("samples", text, offer, 3, 4)["tokens"]
    assert list(pair.decode.call("loaded").values()) == [theirs] * 3
    if pair.setup.exact:  # in bfloat16 a batch of three may round otherwise
        assert {tokens[0] for tokens in said} == {reference["tokens"][0]}
    pair.prefill.call("step", SOON)
    counters = pair.prefill.call("counters")
    assert (counters["leases"], counters["expired"], pair.prefill.call("requests_left")) == (0, 0, 0)
    assert (pair.prefill.call("free_blocks"), pair.decode.call("free_blocks")) == free
    pair.forget()


@with_states
def test_ticket_for_all_tokens_of_a_prompt_leaves_the_answer_right(pair: Pair) -> None:
    """The engine computes the last token of a prompt in any case; recurrent state must not see it twice."""
    text = prompt(257, 60)
    reference = pair.reference([text[:-1]])[0]
    offer = pair.prefill.call("prefill", [text])[0]["params"]
    assert offer["remote_num_tokens"] == len(text) - 1
    pair.agree(pair.decode.call("generate", [text[:-1]], [offer])[0], reference)
    pair.decode.call("generate", [text], [offer])  # which ends the lease if the first one was refused
    pair.prefill.call("step", SOON)
    assert pair.prefill.call("counters")["leases"] == 0
    pair.forget()


@with_windows
def test_prompt_of_one_token_hands_over_nothing(pair: Pair) -> None:
    text = prompt(1, 5)
    answer = pair.through([text])[0]
    assert not answer["moved"]
    assert answer["offer"]["remote_num_tokens"] == 0
    pair.agree(answer, pair.reference([text])[0])


@with_windows
def test_simultaneous_requests_are_answered_as_by_a_single_engine(pair: Pair) -> None:
    texts = list(TOGETHER)
    answers = pair.through(texts)
    assert all(answer["moved"] for answer in answers)
    for answer, reference in zip(answers, pair.reference(texts), strict=True):
        pair.agree(answer, reference)
    pair.forget()


@with_windows
def test_second_turn_moves_only_missing_tokens(pair: Pair) -> None:
    first = prompt(290, 7)
    said = pair.through([first])[0]
    second = first + said["tokens"] + prompt(250, 8)
    answer = pair.through([second])[0]
    pages = sum(len(p) for p in answer["moved"].values())
    pair.agree(answer, pair.reference([second])[0])
    pair.forget()
    whole = sum(len(p) for p in pair.through([second])[0]["moved"].values())
    if pair.prefix_caching:
        assert 0 < pages < whole
    else:
        assert pages == whole
    pair.forget()


@with_states
def test_later_turn_shares_attention_blocks_though_its_state_ends_inside_one(
    pair: Pair,
) -> None:
    """The load brings the KV after these blocks and the state. The shared blocks decide the answer."""
    kinds = [name for name, _, _ in pair.about["groups"]]
    if not pair.prefix_caching or "MambaSpec" not in kinds:
        pytest.skip("this setup has no prefixes without a state")
    block, first = pair.about["block_size"], prompt(290, 7)
    answers = []
    for spoiled in (False, True):
        second = first + pair.through([first])[0]["tokens"] + prompt(50, 8)
        reference = second if spoiled else pair.reference([second])[0]
        pair.decode.call("new_loads")
        if spoiled:
            assert pair.decode.call("spoil_cached", kinds.index("FullAttentionSpec")) == 290 // block
        answers += pair.through([second])
        assert pair.decode.call("new_loads") == [("peer", 290 // block * block, len(second) - 1)]
        if not spoiled:
            pair.agree(answers[0], reference)
        pair.forget()
    assert distance(answers[0], answers[1]) > 1e-3, "the blocks that were shared are not used"


@with_states
def test_prompt_of_whole_blocks_loads_the_missing_state(pair: Pair) -> None:
    """All of its attention blocks are here. The load brings the last of them again, and the state."""
    kinds = [name for name, _, _ in pair.about["groups"]]
    if not pair.prefix_caching or "MambaSpec" not in kinds:
        pytest.skip("this setup has no prefixes without a state")
    block = pair.about["block_size"]
    text = prompt(2 * block + 20, 13)
    pair.through([text])
    shorter = text[: 2 * block + 1]
    pair.decode.call("new_loads")
    answer = pair.through([shorter])[0]
    assert pair.decode.call("new_loads") == [("peer", block, 2 * block)]
    pair.agree(answer, pair.reference([shorter])[0])
    pair.forget()


@with_windows
def test_fully_cached_prompt_moves_nothing_and_releases_the_producer(pair: Pair) -> None:
    if not pair.prefix_caching:
        pytest.skip("this setup caches no prefixes")
    block = pair.about["block_size"]
    text = prompt(2 * block + 1, 9)
    pair.through([text])
    pair.decode.call("admitted")
    again = pair.through([text])[0]
    assert not again["moved"]
    assert [(local_tokens, load) for _, local_tokens, load in pair.decode.call("admitted")] == [
        (2 * block, 0)
    ]
    assert pair.prefill.call("requests_left") == 0
    pair.agree(again, pair.reference([text])[0])
    pair.forget()


@every_kind
def test_spoiled_block_of_any_group_changes_the_answer(pair: Pair) -> None:
    # All of it in one block: the one that is spoiled is then all that a group has to go by. The compressed
    # states of DeepSeek V4 matter only beyond its window, and those that a state is made of only when the
    # answer goes beyond a multiple of 128 tokens.
    text = prompt(510 if pair.setup == WHOLE_PAGES else min(60, pair.about["block_size"]), 11)
    sound = pair.through([text])[0]
    pair.forget()
    again = pair.through([text])[0]
    pair.forget()
    assert distance(again, sound) == 0.0, "the pair does not repeat itself, so a change would show nothing"
    for group in range(len(pair.about["groups"])):
        assert distance(pair.spoiled(text, group), sound) > 1e-4, (
            f"group {group}: the answer does not depend on what was moved"
        )
