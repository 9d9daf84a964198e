"""Prompts of the demo. The shortest has about 70 tokens. The longest takes a small engine several steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvferry.serving.corpus import passages

# Lengths in characters; a token has 3 to 4 of them.
_LENGTHS = (240, 1100, 2600, 6400)
_CHARACTERS_PER_TOKEN_AT_LEAST = 2


def prompts(count: int, max_prompt_tokens: int) -> Sequence[str]:
    """Return up to `count` prompts, of about 70, with 240, 1100, 2600 and 6400 characters in turn.

    A prompt that may have more than `max_prompt_tokens` tokens is cut.
    """
    longest = max_prompt_tokens * _CHARACTERS_PER_TOKEN_AT_LEAST
    whole = islice(passages(max(_LENGTHS)), count)
    return [text[: min(_LENGTHS[i % len(_LENGTHS)], longest)] for i, text in enumerate(whole)]
