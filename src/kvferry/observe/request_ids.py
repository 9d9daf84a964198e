"""Match the ids that clients know to the engine's request ids."""

from __future__ import annotations

import re

_HEAD = r"(?:\d+_)?(?:[a-z]+[-_])*"
"""Prefix that vLLM adds to an id: number of the answer, and kind of request."""


def matches_id(request_id: str, said: str) -> bool:
    """Return whether an engine's request id equals or begins with `said`, with or without vLLM's prefixes.

    >>> matches_id("cmpl-5f3a-0-1b2c3d4e", "cmpl-5f3a")  # id of the answer
    True
    >>> matches_id("1_chatcmpl-5f3a-1b2c3d4e", "5f3a")  # X-Request-Id, of an answer with two choices
    True
    >>> matches_id("cmpl-5f3a-0-1b2c3d4e", "1b2c")
    False
    """
    return request_id.startswith(said) or re.match(_HEAD + re.escape(said), request_id) is not None
