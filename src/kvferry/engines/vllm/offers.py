"""What sources have for a request: each by itself, and two together, one the beginning and one the rest.

Only layers that see everything need a beginning. All that others need is at the end of a prefix, so it comes
with the last part, and parts meet where blocks of the first kind do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from kvferry.cache.bids import Bid
from kvferry.engines.vllm.source import Source
from kvferry.geometry import GroupKind
from kvferry.planning.select import Span, sees_all


@dataclass(frozen=True, slots=True)
class Offer:
    """What may be taken.

    Attributes:
        bid: all of it.
        legs: who brings it, in the order of the prompt.
    """

    bid: Bid
    legs: tuple[tuple[Source, Bid], ...]

    @property
    def last(self) -> Source:
        """Who brings the end."""
        return self.legs[-1][0]

    def parts(self, have: int, external: int, prompt: int) -> list[tuple[Source, Bid, Span]]:
        """What each leg is to bring; a leg that is all here by now is left out.

        Args:
            have: tokens that the engine had when this was offered.
            external: tokens of the prefix that it has not now.
            prompt: tokens of the prompt.
        """
        total, last, found = have + self.bid.tokens, have, list[tuple[Source, Bid, Span]]()
        for source, bid in self.legs:
            first, last = last, last + bid.tokens
            span = Span(total - external, total, prompt, (first, last) if len(self.legs) > 1 else None)
            if span.begins < span.ends:
                found.append((source, bid, span))
        return found


def grain_of(blocks: Iterable[tuple[GroupKind, int]]) -> int:
    """Tokens at multiples of which two parts may meet; 0 if no layer needs a beginning.

    Args:
        blocks: kind of every group of the engine, and tokens of its blocks.

    >>> grain_of([(GroupKind.FULL, 48), (GroupKind.MLA, 32), (GroupKind.SLIDING, 7)])
    96
    """
    found = [tokens for kind, tokens in blocks if sees_all(kind)]
    return lcm(*found) if found else 0


def offers_of(sources: Sequence[Source], request: Any, have: int, grain: int) -> list[Offer]:
    """What each source has, then what two have together.

    Args:
        sources: that may serve the request.
        request: vLLM's.
        have: tokens that the engine has.
        grain: tokens at multiples of which two parts may meet; 0 if no layer needs a beginning.
    """
    found = [Offer(bid, ((one, bid),)) for one in sources for bid in one.bids(request, have)]
    if len(sources) > 1 and grain:
        found += _composed(sources, request, have, grain)
    return found


def _composed(sources: Sequence[Source], request: Any, have: int, grain: int) -> Iterator[Offer]:
    for first in sources:
        if (head := first.head(request, have, grain)) is None:
            continue
        for last in sources:
            tail = last.tail(request, have, have + head.tokens) if last is not first else None
            if tail is not None:
                yield Offer(Bid.composed(head, tail), ((first, head), (last, tail)))
