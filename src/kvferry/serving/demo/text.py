"""Prompts of the demo: from less than a block to several steps of a small engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvferry.serving.corpus import passages

# In characters; a token is 3 to 4 of them.
_LENGTHS = (240, 1100, 2600, 6400)
_CHARACTERS_PER_TOKEN_AT_LEAST = 2


def prompts(count: int, max_prompt_tokens: int) -> Sequence[str]:
    """Return `count` passages without common prefixes, of four lengths in turn.

    Args:
        count: number of passages.
        max_prompt_tokens: limit of the engine; longer passages are cut.
    """
    longest = max_prompt_tokens * _CHARACTERS_PER_TOKEN_AT_LEAST
    whole = islice(passages(max(_LENGTHS)), count)
    return [text[: min(_LENGTHS[i % len(_LENGTHS)], longest)] for i, text in enumerate(whole)]
