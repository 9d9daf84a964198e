"""Hints: what a request says about the later use of its KV in the tiers.

A client or router sends them as ``hints`` in ``kv_transfer_params``, or as an action of vLLM's ``kv_hints``:

    {"spans": [{"end": 4096, "retain_seconds": 600, "priority": 10}, {"start": 4096, "store": false}],
     "prefetch": "prompt", "ends_session": false}

They are checked against a schema, because they come from API clients. A malformed value is no hint at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from kvferry.common.errors import ProtocolError
from kvferry.common.text import shown
from kvferry.connector.engine import Request
from kvferry.transport.redeem import MAX_TOKENS

MAX_SPANS = 16
MAX_SESSION_CHARACTERS = 256

_Position = Annotated[int, Meta(ge=0, lt=MAX_TOKENS)]


class HintSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request says about its tokens from `start` up to, and not including, `end`.

    Attributes:
        end: None for the end of the answer.
        store: False to store none of these tokens, nor those that follow, in any tier.
        retain_seconds: time after the request's end for which host memory keeps the chunks of these tokens.
        priority: if a tenant wants to retain more than it may, its chunks of a lower priority give way.
    """

    start: _Position = 0
    end: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    store: bool = True
    retain_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    priority: Annotated[int, Meta(ge=0, le=100)] = 0


class Hints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hints of a request.

    Attributes:
        prefetch: what to bring to host memory when the request arrives: the chunks of its own prompt, or
            those of the last request of its session.
        ends_session: True if the request is the last one of its session, whose chunks are then cold.
    """

    spans: Annotated[tuple[HintSpan, ...], Meta(max_length=MAX_SPANS)] = ()
    prefetch: Literal["prompt", "session"] | None = None
    ends_session: bool = False

    def stored_tokens(self, tokens: int) -> int:
        """Return how many of the first `tokens` tokens tiers may store: those before the first excluded one.

        >>> Hints(spans=(HintSpan(start=512, store=False),)).stored_tokens(4096)
        512
        """
        # No prefix that contains an excluded token can be loaded, so later tokens would be stored in vain.
        return min([tokens, *(span.start for span in self.spans if not span.store)])

    def retained(self, most_seconds: float) -> Iterator[HintSpan]:
        """Yield the spans to retain, each for at most `most_seconds`."""
        for span in self.spans:
            if span.store and span.retain_seconds:
                yield replace(span, retain_seconds=min(span.retain_seconds, most_seconds))


NO_HINTS = Hints()


def parse_hints(value: Any) -> Hints:
    """Parse hints from plain JSON values, or raise ProtocolError if they are malformed."""
    try:
        return msgspec.convert(value, Hints)
    except (msgspec.ValidationError, UnicodeError, RecursionError) as error:
        raise ProtocolError(
            f"hints: {shown(str(error), 200)}; send an object as in docs/hints.md, or leave hints out"
        ) from error


def read_hints(request: Request) -> Hints:
    """Return the hints of a request, or raise ProtocolError if they are malformed."""
    return NO_HINTS if request.hints is None else parse_hints(request.hints)


def session_of(request: Request) -> tuple[str, str] | None:
    """Return the (cache salt, session id) of a request; None without a session, or if its id is too long."""
    session = request.session_id
    if not isinstance(session, str) or not 0 < len(session) <= MAX_SESSION_CHARACTERS:
        return None
    return request.cache_salt or "", session


def hints_in(params: Any) -> Any:
    """Return the unchecked hints in a request's ``kv_transfer_params``; None without hints."""
    return params.get("hints") if isinstance(params, dict) else None
