"""Remember fields that a decode engine refused after a prefill, so that equal ones cost no further prefill.

A prefill engine checks almost all fields of a request (`bodies.prefill_body`). It does not know the decode
engine's settings, and gets no ``max_tokens`` that could exceed the model's context. Such a refusal depends on
the fields beside the prompt. So a request with equal fields goes to a decode engine alone, until one is
accepted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import xxhash

from kvferry.tools.serving.router.bodies import encoded

_MAX_REMEMBERED = 1000
# The prompt, and keys that differ between requests of one kind.
_NOT_COMPARED = frozenset(
    {
        "cache_salt",
        "documents",
        "messages",
        "metadata",
        "prompt",
        "prompt_cache_key",
        "request_id",
        "safety_identifier",
        "seed",
        "session_id",
        "system",
        "tools",
        "user",
    }
)


class Refusals:
    """Fields of requests that decode engines have refused. The least recently refused ones are dropped."""

    def __init__(self) -> None:
        self._refused: OrderedDict[bytes, None] = OrderedDict()

    def includes(self, path: str, body: Mapping[str, Any]) -> bool:
        """Return whether a request with equal fields was refused, and none was accepted since."""
        # Digesting costs time, and nearly always nothing was refused.
        return bool(self._refused) and _digest(path, body) in self._refused

    def add(self, path: str, body: Mapping[str, Any]) -> None:
        self._refused[_digest(path, body)] = None
        if len(self._refused) > _MAX_REMEMBERED:
            self._refused.popitem(last=False)

    def discard(self, path: str, body: Mapping[str, Any]) -> None:
        self._refused.pop(_digest(path, body), None)


def _digest(path: str, body: Mapping[str, Any]) -> bytes:
    kept = [(key, body[key]) for key in sorted(body.keys() - _NOT_COMPARED)]
    return xxhash.xxh3_128_digest(encoded([path, kept]))
