"""Prompts of up to two blocks, and how often they may be admitted."""

from __future__ import annotations

from typing import Any

import pytest

from support.vllm_engine.pair import Pair, prompt
from support.vllm_engine.process import Engine

MOST_ADMISSIONS = 3
"""Of a request of which nothing fails and that is not preempted: to load, to compute, and one to spare."""


def every_length(block_tokens: int, seed: int) -> list[list[int]]:
    """Return prompts of 1, 2, ... tokens, up to one token more than two blocks have."""
    return [prompt(length, seed + length) for length in range(1, 2 * block_tokens + 2)]


def block_ends(block_tokens: int, seed: int) -> list[list[int]]:
    """Return those that end at a block's middle or end, a token before it, or a token behind it."""
    half = block_tokens // 2
    return [text for text in every_length(block_tokens, seed) if (len(text) + 1) % half < 3]


of_each_length = pytest.mark.parametrize(
    "texts_of", [block_ends, pytest.param(every_length, marks=pytest.mark.long)], ids=lambda of: of.__name__
)


def limit_admissions(engine: Engine) -> None:
    """From now on an engine fails when it admits a request more often than that."""
    engine.call("limit_admissions", MOST_ADMISSIONS)


def through(pair: Pair, texts: list[list[int]], at_once: int = 32) -> list[dict[str, Any]]:
    """Short answers through both engines, so many at once that no lease ends before its load begins."""
    batches = [texts[at : at + at_once] for at in range(0, len(texts), at_once)]
    return [answer for batch in batches for answer in pair.through(batch, tokens=2)]
