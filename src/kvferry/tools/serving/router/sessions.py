"""Find the session of a request, and the engine that serves all requests of a session.

Rendezvous hashing (Thaler and Ravishankar, 1998) gives each pair of session and engine a score, and the
engine with the highest score serves the session. So routers need no table and agree with each other. If an
engine is added or lost, only sessions move that it gains or has served.
"""

from __future__ import annotations

from typing import Any

import xxhash

from kvferry.tools.serving.router.replies import Headers

_SESSION_HEADER = b"x-session-id"
_SESSION_FIELDS = ("prompt_cache_key", "user")


def session_of(headers: Headers, body: dict[str, Any]) -> int | None:
    """Return a 64-bit hash of the name of a request's session; None if it names none.

    The name is the header ``x-session-id``, else the field ``prompt_cache_key``, else the field ``user``.
    """
    name = next((value for name, value in headers if name == _SESSION_HEADER and value), None)
    if name is None:
        fields = (body.get(field) for field in _SESSION_FIELDS)
        text = next((value for value in fields if isinstance(value, str) and value), None)
        if text is None:
            return None
        name = text.encode("utf-8", "surrogatepass")  # JSON may have half of a surrogate pair
    return xxhash.xxh3_64_intdigest(name)


def score(session: int, url: str) -> int:
    """Return the score of an engine for a session: the engine with the highest score serves it.

    >>> urls = ("http://a:1", "http://b:1")
    >>> [max(urls, key=lambda url: score(session, url)) for session in (1, 2, 3)]
    ['http://b:1', 'http://a:1', 'http://b:1']
    """
    return xxhash.xxh3_64_intdigest(session.to_bytes(8, "little") + url.encode())
