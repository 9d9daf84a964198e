"""Prompts of every length from one token to two blocks, and how often they may be admitted."""

from __future__ import annotations

from support.vllm_engine.pair import prompt
from support.vllm_engine.process import Engine

MOST_ADMISSIONS = 3
"""Of a request of which nothing fails and that is not preempted: to load, to compute, and one to spare."""


def every_length(block_tokens: int, seed: int) -> list[list[int]]:
    """Return prompts of 1, 2, ... tokens, up to one token more than two blocks have."""
    return [prompt(length, seed + length) for length in range(1, 2 * block_tokens + 2)]


def limit_admissions(engine: Engine) -> None:
    """From now on an engine fails when it admits a request more often than that."""
    engine.call("limit_admissions", MOST_ADMISSIONS)
