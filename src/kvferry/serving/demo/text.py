"""Which passages the demo asks about: from shorter than a block to several steps of a small engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvferry.serving.corpus import passages

# In characters; a token is 3 to 4 of them.
_LENGTHS = (240, 1100, 2600, 6400)
_CHARACTERS_PER_TOKEN_AT_LEAST = 2


def prompts(count: int, max_prompt_tokens: int) -> Sequence[str]:
    """`count` passages that share no prefix, of four lengths in turn.

    Args:
        count: how many.
        max_prompt_tokens: what the engine takes; longer passages are cut to what surely fits.
    """
    longest = max_prompt_tokens * _CHARACTERS_PER_TOKEN_AT_LEAST
    whole = islice(passages(max(_LENGTHS)), count)
    return [text[: min(_LENGTHS[i % len(_LENGTHS)], longest)] for i, text in enumerate(whole)]
