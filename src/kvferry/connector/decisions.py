"""Values of a decision: what sources bid, why others bid nothing, and why a bid was taken or none."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.connector.bids import Bid


class MissReason(StrEnum):
    """Why a request got nothing from a source. Causes that cannot be distinguished are NOT_STORED."""

    NOT_STORED = "not_stored"  # never stored, or evicted so long ago that no record is left
    EVICTED = "evicted"  # stored before, and evicted recently
    STORING = "storing"  # a store of it is under way
    SHORT_PROMPT = "short_prompt"  # the prompt is shorter than a chunk
    LOCAL = "local"  # the engine's own prefix cache already holds all usable tokens
    OTHER_NAMESPACE = "other_namespace"  # the tiers hold another model of the same name
    UNNAMED = "unnamed"  # no chunk key can be computed for the prompt's content
    REFUSED = "refused"  # the offer or the peer is not usable
    SKIPPED = "skipped"  # the request must not read a cache, for example with prompt logprobs
    LOOKING = "looking"  # the look-up did not end in time
    LOST_BID = "lost_bid"  # another source, or computing, was cheaper
    BUSY = "busy"  # too many loads under way
    NO_ROOM = "no_room"  # too few free blocks for the load and the tokens after it
    ATTEMPTS = "attempts"  # the request had no load attempts left
    CHECKSUM = "checksum"  # the bytes read are damaged
    DEADLINE = "deadline"  # the load took longer than load_timeout_seconds
    FAILED = "failed"  # the load failed for another reason


class DecisionReason(StrEnum):
    """Why admission took a bid, or took none."""

    BEST = "the best bid"
    LOOKING = "a source that is still looking may have more"
    NOTHING = "no source has more"
    COMPUTING = "computing is better"
    SKIPPED = "it reads no cache"
    NO_ROOM = "the engine has no blocks for a load and what comes after it"
    ATTEMPTS = "no attempt is left"


@dataclass(frozen=True, slots=True)
class SourceMiss:
    """Why a source bids nothing.

    Attributes:
        source: name of the source.
        reason: the kind of miss.
        group: number and kind of the KV cache group with a missing chunk, ``several`` for more than one,
            empty if the miss has nothing to do with groups.
        detail: text for people.
    """

    source: str
    reason: MissReason
    group: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ValuedBid:
    """A bid and its value.

    Attributes:
        source: name of the source. The bid names the peer.
        bid: tokens by place, and whether the source is still looking.
        value: value under the policy; 0 for an excluded bid.
        excluded: why the bid may not be taken; empty if it may.
    """

    source: str
    bid: Bid
    value: float
    excluded: str = ""
