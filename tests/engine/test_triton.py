"""Engines that compute attention by vLLM's Triton backends for GPUs, as these declare layouts and blocks.

Triton's interpreter runs the kernels, and takes seconds for a prompt. `KVFERRY_TEST_BACKEND=triton` asks for
these backends, `KVFERRY_TEST_RUNNER=2` for the interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine.test_layouts import test_spoiled_block_of_any_group_changes_the_answer  # noqa: F401 - runs here too
from support.vllm_engine import backends
from support.vllm_engine.inside import distance
from support.vllm_engine.marks import engines
from support.vllm_engine.pair import Pair, Setup, prompt

# The interpreter copies the cache whenever it launches a kernel.
SMALL = {"kv_cache_memory_bytes": 8 << 20, "max_model_len": 512, "max_num_batched_tokens": 512}
CODES = {"kv_cache_dtype": "fp8"}


def _pair(family: str, prefill: str, decode: str, *layouts: str, **options: Any) -> Setup:
    """Return a pair. It is labelled by what each engine has: the layout, and the tokens of a block."""
    sizes = ({"block_size": int(label.rpartition("-")[2])} for label in (prefill, decode))
    return Setup(
        f"small-{family}",
        f"{prefill}-to-{decode}",
        SMALL | options,
        prefill_options=next(sizes),
        decode_options=next(sizes),
        layouts=layouts or None,
    )


SETUPS = (
    _pair("gemma3", "BLHNC-16", "BLHNC-64"),
    _pair("gemma3", "LBNHC-64", "LBHNC-32", "LBNHC", "LBHNC"),
    _pair("qwen3", "BHLNC-64", "BHLNC-16"),
    _pair("qwen3", "LHBNC-32", "BLNHC-64", "LHBNC", "BLNHC"),
    _pair("qwen3", "BLNHC-16", "LHBNC-32", "BLNHC", "LHBNC", **CODES),
    _pair("gptoss", "LBHNC-32", "BHLNC-16", "LBHNC", "BHLNC"),
    _pair("dsv3", "LBNHC-16", "BLHNC-64", "engine", "BLHNC"),
    _pair("dsv3", "BHLNC-64", "LBNHC-32", "BHLNC", "engine", **CODES),
    _pair("lfm2", "BLHNC-16", "LBNHC-32", "auto", "LBNHC"),
    _pair("nemotronh", "LBHNC-128", "BLHNC-256", "LBHNC", "auto"),
    _pair("qwen3next", "BLNHC-192", "BLHNC-256", "BLNHC", "auto", mamba_ssm_cache_dtype="float32"),
)
pytestmark = [
    *engines("pair", (), SETUPS),
    pytest.mark.skipif(not backends.TRITON, reason=f"{backends.VARIABLE} is not triton"),
    pytest.mark.timeout(600),
]


def test_engines_have_the_layouts_and_block_sizes_that_their_backend_declares(pair: Pair) -> None:
    for label, about in zip(pair.setup.label.split("-to-"), (pair.about, pair.about_decode), strict=True):
        assert f"{about['layout']}-{about['block_size']}" == label
        assert about["kernel_tokens"] == {about["block_size"]}, "the kernels read blocks of every size whole"


def test_content_equals_the_producers_and_the_answer_a_single_engines(pair: Pair) -> None:
    # In one block; past the ends of blocks, and of the window.
    smaller = min(pair.about["block_size"], pair.about_decode["block_size"])
    for length in (12, max(100, smaller + 8)):
        text, said = pair.own_words(prompt(length - 1, length), tokens=3)
        pair.decode.call("poison")
        answer = pair.through([text], tokens=3)[0]
        assert answer["moved"], f"{length} tokens: nothing was loaded"
        assert answer["tokens"] == said["tokens"]
        assert distance(answer, said) == 0.0
        pair.forget()
