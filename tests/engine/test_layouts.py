"""Engines whose blocks differ in size or lie differently, and layouts that the connector asks for."""

from __future__ import annotations

import re
from dataclasses import replace

from kvferry.connector.messages import MOVED
from support.vllm_engine.inside import distance
from support.vllm_engine.marks import engines
from support.vllm_engine.pair import Pair, Setup, prompt

STEPS = {"max_num_batched_tokens": 256}
VERIFIED = {"verify_transfers": True}
SMALL, LARGE = {"block_size": 64}, {"block_size": 128}
DENSE = {"family": "qwen3", "options": STEPS}
CODES = {"family": "qwen3", "options": {**STEPS, "kv_cache_dtype": "fp8"}}
WINDOWS = {"family": "gemma3", "options": STEPS}
LATENTS = {"family": "dsv3"}
SPLIT = {"kernel_tokens": 32}
"""vLLM makes each of its blocks of several kernel blocks of so many tokens."""
SMALLEST = {"block_size": 16}
STATES = {"family": "lfm2", "options": STEPS}
MAMBA = {"family": "nemotronh", "options": STEPS}
# vLLM's Mamba2 for CPUs caches prefixes if no step of prefill goes past the end of a block.
SNAPSHOTS = {**MAMBA, "options": {"enable_prefix_caching": True, "max_num_batched_tokens": 128}}
WHOLE = {"block_size": 256, "max_num_batched_tokens": 256}
# vLLM makes blocks of attention as large as a state: of 128 tokens it makes 256 here, and of 16 it makes 160.
# A state takes as much room on every processor if its dtype is named.
DELTA = {"family": "qwen3next", "options": {**STEPS, "mamba_ssm_cache_dtype": "float32"}}
QWEN3_5 = {**DELTA, "family": "qwen3_5"}

REPRESENTATIVE = (
    Setup(
        **WINDOWS,
        label="auto",
        layouts=("engine", "auto"),
        prefill_options=LARGE | SPLIT,
        decode_options=SMALL,
    ),
)
ALL = (
    Setup(**CODES, label="fp8-64-to-128-needs-avx512", prefill_options=SMALL, decode_options=LARGE),
    Setup(
        **DENSE,
        label="auto",
        layouts=("auto", "engine"),
        prefill_options=SMALL,
        decode_options=LARGE | SPLIT,
    ),
    Setup(**DENSE, label="128-to-64", prefill_options=LARGE, decode_options=SMALL),
    Setup(**DENSE, label="LBHNC-to-BLHNC", layouts=("LBHNC", "BLHNC")),
    Setup(**DENSE, label="BHLNC-to-LHBNC", layouts=("BHLNC", "LHBNC")),
    Setup(**DENSE, label="LHBNC-to-BHLNC", layouts=("LHBNC", "BHLNC")),
    Setup(**DENSE, label="BHLNC-to-BHLNC", layouts=("auto", "auto")),
    *(
        Setup(family, "64-to-128", STEPS, prefill_options=SMALL, decode_options=LARGE)
        for family in ("gemma4", "gptoss", "llama4")
    ),
    Setup(**WINDOWS, label="64-to-128", prefill_options=SMALL, decode_options=LARGE),
    Setup(**WINDOWS, label="BLHNC-to-LBHNC", layouts=("BLHNC", "LBHNC")),
    Setup(**WINDOWS, label="BLHNC-to-BLHNC", layouts=("auto", "auto")),
    Setup(**LATENTS, label="BHLNC-to-LBNHC", layouts=("auto", "engine")),
    Setup(**LATENTS, label="LBNHC-to-BLHNC", layouts=("engine", "BLHNC")),
    Setup(
        **LATENTS,
        label="16-to-64",
        prefill_options={"kernel_tokens": 16},
        decode_options={"kernel_tokens": 16, "block_size": 64},
    ),
    Setup(**STATES, label="64-to-128", prefill_options=SMALL, decode_options=LARGE),
    Setup(**STATES, label="128-to-64", prefill_options=LARGE, decode_options=SMALL),
    Setup(**STATES, label="LBHNC-to-BLHNC", layouts=("LBHNC", "BLHNC")),
    Setup(**STATES, label="BLHNC-to-LBHNC", layouts=("BLHNC", "LBHNC")),
    Setup(**STATES, label="BLHNC-to-BLHNC", layouts=("auto", "auto")),
    Setup(**MAMBA, label="128-to-256", layouts=("LBHNC", "BLHNC"), decode_options={"block_size": 256}),
    Setup(**SNAPSHOTS, label="256-to-128", layouts=("BLHNC", "LBHNC"), prefill_options=WHOLE),
    Setup(**DELTA, label="160-to-256", layouts=("LBHNC", "BLHNC"), prefill_options=SMALLEST | SPLIT),
    Setup(**DELTA, label="256-to-160", layouts=("BLHNC", "LBHNC"), decode_options=SMALLEST | SPLIT),
    Setup(**QWEN3_5, label="160-to-256", layouts=("BLHNC", "LBHNC"), prefill_options=SMALLEST | SPLIT),
    Setup(**QWEN3_5, label="256-to-160", layouts=("LBHNC", "BLHNC"), decode_options=SMALLEST | SPLIT),
)
pytestmark = engines(
    "pair", *([replace(one, connector=VERIFIED) for one in each] for each in (REPRESENTATIVE, ALL))
)
LEFT = re.compile(f"{MOVED}: layer .*: the layer computes in .*; expected .*: start it anew")
IN_ONE_STEP = {"qwen3", "gemma3", "gemma4", "gptoss", "llama4", "nemotronh"}
"""Families that compute 200 tokens in one step: a scheduler offers them before it learns of a move."""
CHOSEN = {"auto": {"qwen3": "BHLNC", "dsv3": "BHLNC"}, "engine": {"dsv3": "LBNHC"}}
"""What settings that name no layout come to; BLHNC and LBHNC for other families."""


def test_engines_use_the_configured_layouts_and_block_sizes(pair: Pair) -> None:
    wanted = pair.setup.layouts or ("engine", "engine")
    for setting, about in zip(wanted, (pair.about, pair.about_decode), strict=True):
        usual = {"auto": "BLHNC", "engine": "LBHNC"}.get(setting, setting)
        assert about["layout"] == CHOSEN.get(setting, {}).get(pair.setup.family, usual)
    if labelled := re.findall(r"\b\d{2,}\b", pair.setup.label):
        assert [str(about["block_size"]) for about in (pair.about, pair.about_decode)] == labelled


def test_blocks_consist_of_kernel_blocks_of_the_configured_size(pair: Pair) -> None:
    abouts = {"prefill": pair.about, "decode": pair.about_decode}
    for role, about in abouts.items():
        options = {**pair.setup.options, **getattr(pair.setup, f"{role}_options")}
        assert about["kernel_tokens"] == {options.get("kernel_tokens", about["block_size"])}


def test_content_equals_the_producers_and_the_answer_a_single_engines(pair: Pair) -> None:
    for length in (2, 40, 128, 300, 700):
        text, said = pair.own_words(prompt(length - 1, length))
        answer = pair.through([text])[0]
        assert answer["moved"], f"{length} tokens: nothing was loaded"
        assert answer["tokens"] == said["tokens"]
        assert distance(answer, said) == 0.0
        pair.forget()


def test_earlier_content_of_blocks_does_not_change_the_answer(pair: Pair) -> None:
    # One answer goes on past a small block, into the part of a larger one that no small block has covered.
    small = min(pair.about["block_size"], pair.about_decode["block_size"])
    for length in (40, small - 4, 129, 188):
        text, said = pair.own_words(prompt(length - 1, 3000 + length))
        pair.decode.call("poison")
        answer = pair.through([text])[0]
        assert answer["moved"]
        assert distance(answer, said) == 0.0
        pair.forget()


def test_spoiled_block_of_any_group_changes_the_answer(pair: Pair) -> None:
    # All of it in one block: the one that is spoiled is then all that a group has to go by.
    blocks = pair.about["block_size"], pair.about_decode["block_size"]
    text = prompt(min(60, *blocks), 11)
    sound = pair.through([text])[0]
    pair.forget()
    for group in range(len(pair.about_decode["groups"])):
        assert distance(pair.spoiled(text, group), sound) > 1e-4, (
            f"group {group}: the answer does not depend on what was moved"
        )


def test_bytes_that_change_on_the_way_are_noticed_or_change_the_answer_if_nothing_is_verified(
    pair: Pair,
) -> None:
    blocks = pair.about["block_size"], pair.about_decode["block_size"]
    text = prompt(min(60, *blocks), 12)
    (alone,) = pair.decode.call("generate", [text])
    pair.forget()
    for group in range(len(pair.about_decode["groups"])):
        for verified in (True, False):
            (offer,) = [one["params"] for one in pair.prefill.call("prefill", [text])]
            damaged = pair.decode.call("counted").get("misses peer checksum ", 0)
            pair.decode.call("spoil_on_the_way", group, verified=verified)
            (answer,) = pair.decode.call("generate", [text], [offer])
            pair.decode.call("spoil_on_the_way", None)
            assert bool(pair.decode.call("loaded")) is not verified, f"group {group}"
            assert pair.decode.call("counted").get("misses peer checksum ", 0) - damaged == verified
            apart = distance(answer, alone)
            assert (apart < 1e-4) is verified, f"group {group}, verified: {verified}: {apart} apart"
            pair.forget()


def test_peers_never_read_memory_that_the_engine_has_left(pair: Pair) -> None:
    """The last test of a pair: its prefill engine offers nothing from here on."""
    pair.prefill.call("register_again")
    text = prompt(200, 31)
    (computed,) = pair.turned().reference([text])
    assert pair.through([text])[0]["moved"], "registering the same tensors again changes nothing"
    pair.forget()
    pair.prefill.call("move_cache", "shift")
    for first in (True, False):
        (answer,) = pair.through([text])
        if not first or pair.setup.family in IN_ONE_STEP:
            assert bool(answer["offer"]["remote_num_tokens"]) is first
        assert not answer["moved"]
        assert answer["tokens"] == computed["tokens"]
        assert distance(answer, computed) == 0.0
        pair.forget()
    assert len(LEFT.findall(pair.prefill.log.read_text())) == 1
    assert not LEFT.findall(pair.decode.log.read_text())
