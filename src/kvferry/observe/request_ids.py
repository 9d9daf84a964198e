"""What a request is called: by the engine, and by whoever asked."""

from __future__ import annotations

import re

_HEAD = r"(?:\d+_)?(?:[a-z]+[-_])*"
"""What an engine puts before an id: which of several answers, and the kind of request."""


def matches_id(request_id: str, said: str) -> bool:
    """Whether an engine's request may be meant: by its id, a client's for it, or the beginning of one.

    >>> matches_id("cmpl-5f3a-0-1b2c3d4e", "cmpl-5f3a")  # id of the answer
    True
    >>> matches_id("1_chatcmpl-5f3a-1b2c3d4e", "5f3a")  # X-Request-Id, of an answer with two choices
    True
    >>> matches_id("cmpl-5f3a-0-1b2c3d4e", "1b2c")
    False
    """
    return request_id.startswith(said) or re.match(_HEAD + re.escape(said), request_id) is not None
