"""Events of a request and its loads, with default values."""

from __future__ import annotations

from typing import Any

from kvferry.connector.bids import PlaceTokens
from kvferry.connector.events import (
    DecisionReason,
    LoadBegan,
    LoadEnded,
    LoadOutcome,
    SourcesAsked,
    ValuedBid,
)


def sources_asked(at: float, *bids: ValuedBid, request_id: str = "a", **more: Any) -> SourcesAsked:
    """Sources of a request were asked; without more, nothing was found."""
    given = {
        "local_tokens": 0,
        "compute_value": 0.0,
        "misses": (),
        "chosen": None,
        "why": DecisionReason.NOTHING,
        **more,
    }
    given.setdefault("resumable_tokens", given["local_tokens"])
    return SourcesAsked(request_id, at, bids=bids, **given)


def load_began(
    load: str = "a#1",
    source: str = "peer",
    end: int = 80,
    begin: int = 0,
    *,
    at: float = 0.0,
    peer: str | None = None,
    parts: tuple[PlaceTokens, ...] | None = None,
) -> LoadBegan:
    """A load began, of the request and the attempt in its name, ``REQUEST#ATTEMPT[.PART]``."""
    place = "peer" if source == "peer" else "host"
    return LoadBegan(
        load.partition("#")[0],
        at,
        load=load,
        source=source,
        peer=source if peer is None else peer,
        parts=(PlaceTokens(place, end - begin),) if parts is None else parts,
        begin=begin,
        end=end,
        attempt=load.partition(".")[0],
    )


def load_ended(
    load: str | LoadBegan = "a#1",
    source: str = "peer",
    outcome: LoadOutcome = LoadOutcome.READY,
    *,
    at: float = 0.5,
    **more: Any,
) -> LoadEnded:
    """A load ended: one that began at 0, of the request in its name, or the given one."""
    began = load_began(load, source) if isinstance(load, str) else load
    return LoadEnded(began.request_id, at, began=began, outcome=outcome, **more)
