"""Plans to load a prefix: from one source, or the beginning from one source and the rest from another.

Only layers that see all tokens need a beginning. Windows and states are at the end of a prefix and come with
its last part. The two parts meet where blocks of the layers that see all tokens end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from kvferry.connector.bids import Bid
from kvferry.connector.engine import Request
from kvferry.connector.source import Source
from kvferry.geometry import GroupKind
from kvferry.planning.select import LoadSpan, attends_to_all


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A plan that admission may take.

    Attributes:
        bid: the whole bid.
        legs: each source with its part of the bid, in the order of the prompt.
    """

    bid: Bid
    legs: tuple[tuple[Source, Bid], ...]

    @property
    def last(self) -> Source:
        """The source of the last part."""
        return self.legs[-1][0]

    def parts(self, local_tokens: int, external: int, prompt: int) -> list[tuple[Source, Bid, LoadSpan]]:
        """Return (source, bid, span) of every leg that the engine does not have by now.

        Args:
            local_tokens: tokens that the engine had when the plan was made.
            external: tokens of the prefix that it lacks now.
            prompt: tokens of the prompt.
        """
        total, last, found = (
            local_tokens + self.bid.tokens,
            local_tokens,
            list[tuple[Source, Bid, LoadSpan]](),
        )
        for source, bid in self.legs:
            first, last = last, last + bid.tokens
            span = LoadSpan(total - external, total, prompt, (first, last) if len(self.legs) > 1 else None)
            if span.begins < span.ends:
                found.append((source, bid, span))
        return found


def common_alignment(blocks: Iterable[tuple[GroupKind, int]]) -> int:
    """Return the tokens at multiples of which two parts may meet; 0 if no layer needs a beginning.

    Args:
        blocks: kind and block size in tokens of every group of the engine.

    >>> common_alignment([(GroupKind.FULL, 48), (GroupKind.MLA, 32), (GroupKind.SLIDING, 7)])
    96
    """
    found = [tokens for kind, tokens in blocks if attends_to_all(kind)]
    return lcm(*found) if found else 0


def load_plans(
    sources: Sequence[Source], request: Request, local_tokens: int, alignment_tokens: int
) -> list[LoadPlan]:
    """Return the plans with each source alone, then those with two sources.

    Args:
        sources: those that may serve the request.
        request: the request.
        local_tokens: tokens that the engine has.
        alignment_tokens: see `common_alignment`.
    """
    found = [LoadPlan(bid, ((one, bid),)) for one in sources for bid in one.bids(request, local_tokens)]
    if len(sources) > 1 and alignment_tokens:
        found += _composed(sources, request, local_tokens, alignment_tokens)
    return found


def _composed(
    sources: Sequence[Source], request: Request, local_tokens: int, alignment_tokens: int
) -> Iterator[LoadPlan]:
    for first in sources:
        if (head := first.head(request, local_tokens, alignment_tokens)) is None:
            continue
        for last in sources:
            tail = last.tail(request, local_tokens, local_tokens + head.tokens) if last is not first else None
            if tail is not None:
                yield LoadPlan(Bid.composed(head, tail), ((first, head), (last, tail)))
