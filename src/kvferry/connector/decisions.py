"""Values that describe a decision: the bids, the reasons of sources without a bid, and the choice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.connector.bids import Bid


class MissReason(StrEnum):
    """The reason why a request got no KV from a source.

    NOT_STORED also stands for KV that was evicted so long ago that no record is left.
    """

    NOT_STORED = "not_stored"  # never stored, or evicted so long ago that no record is left
    EVICTED = "evicted"  # stored before, and evicted recently
    STORING = "storing"  # a store of it is under way
    SHORT_PROMPT = "short_prompt"  # the prompt is shorter than a chunk
    LOCAL = "local"  # the engine's own prefix cache already holds all usable tokens
    OTHER_NAMESPACE = "other_namespace"  # the tiers hold another model of the same name
    UNNAMED = "unnamed"  # no chunk key can be computed for the prompt's content
    REFUSED = "refused"  # the offer or the peer is not usable
    GONE = "gone"  # the peer cannot be reached, or has not answered in time
    SKIPPED = "skipped"  # the request must not read a cache, for example with prompt logprobs
    LOOKING = "looking"  # the look-up did not end in time
    LOST_BID = "lost_bid"  # another source, or computing the prompt, was better
    BUSY = "busy"  # too many loads under way
    NO_ROOM = "no_room"  # too few free blocks for the load and the tokens after it
    ATTEMPTS = "attempts"  # the request had no load attempts left
    CHECKSUM = "checksum"  # the bytes read are damaged
    DEADLINE = "deadline"  # the load took longer than load_timeout_seconds
    FAILED = "failed"  # the load failed for another reason


class DecisionReason(StrEnum):
    """The reason why admission took a source's bid (offer to load tokens), or took no bid."""

    BEST = "the best bid"
    ANSWERED = "the best bid of a source that has answered"
    LOOKING = "a source that is still looking may have more"
    UNANSWERED = "no source has answered in time"
    NOTHING = "no source has more"
    COMPUTING = "computing is better"
    SKIPPED = "it reads no cache"
    NO_ROOM = "the engine has no blocks for a load and what comes after it"
    ATTEMPTS = "no attempt is left"


@dataclass(frozen=True, slots=True)
class SourceMiss:
    """The reason why a source does not offer to load any tokens of a request.

    Attributes:
        source: name of the source.
        reason: the reason as one of a fixed set of values.
        group: label (number and kind) of the KV cache group with a missing chunk; ``several`` for more than
            one group; empty if the miss does not depend on groups.
        detail: the reason in detail, as text for people.
    """

    source: str
    reason: MissReason
    group: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ValuedBid:
    """A bid (a source's offer to load tokens of a request) and its value.

    Attributes:
        source: name of the source: ``peer`` or ``tiers``. The bid itself names the peer.
        bid: the bid: number of tokens from each place, and whether the source is still looking up its KV.
        value: value of the bid under the policy; 0 for an excluded bid.
        excluded: reason why the bid may not be taken; empty if the bid may be taken.
    """

    source: str
    bid: Bid
    value: float
    excluded: str = ""
