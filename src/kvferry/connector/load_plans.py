"""Plans to load a prefix: from one source, or its start from one source and the rest from another.

The start is loaded only for layers that attend to all tokens. Layers with a window or recurrent state need
only the end of the prefix, which comes with the last part. The two parts meet at a block boundary of the
layers that attend to all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from kvferry.connector.bids import Bid
from kvferry.connector.source import Answer, Source
from kvferry.geometry import GroupKind
from kvferry.planning.select import LoadSpan, attends_to_all


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A plan to load the KV of a prompt prefix: one source loads all of it, or two sources load a part each.

    Attributes:
        bid: offer to load the whole prefix, by one source or by two.
        source_bids: (source, bid) of each part of the prefix, the start of the prompt first. A bid is the
            source's offer to load tokens.
    """

    bid: Bid
    source_bids: tuple[tuple[Source, Bid], ...]

    @property
    def last(self) -> Source:
        """The source that loads the last part of the prefix."""
        return self.source_bids[-1][0]

    def parts(self, local_tokens: int, load_tokens: int, prompt: int) -> list[tuple[Source, Bid, LoadSpan]]:
        """Return the loads to begin: (source, bid, span) of each part of the prefix that is not loaded yet.

        Leave out parts whose tokens the engine has by now. A bid is the source's offer. A span is the range
        of prompt tokens to load from the source.

        Args:
            local_tokens: number of tokens of the prefix that the engine had when the plan was made.
            load_tokens: number of tokens of the prefix that the engine does not have now.
            prompt: number of tokens of the prompt.
        """
        total, last, found = (
            local_tokens + self.bid.tokens,
            local_tokens,
            list[tuple[Source, Bid, LoadSpan]](),
        )
        for source, bid in self.source_bids:
            first, last = last, last + bid.tokens
            span = LoadSpan(
                total - load_tokens, total, prompt, (first, last) if len(self.source_bids) > 1 else None
            )
            if span.begins < span.ends:
                found.append((source, bid, span))
        return found


def common_alignment(blocks: Iterable[tuple[GroupKind, int]]) -> int:
    """Return the alignment, in tokens, of the position where the parts of a prefix from two sources meet.

    The parts may meet at every multiple of the alignment. It is the least common multiple of the block sizes
    of the groups that attend to all tokens; 0 without such a group.

    Args:
        blocks: (kind, block size in tokens) of every KV cache group of the engine.

    >>> common_alignment([(GroupKind.FULL, 48), (GroupKind.MLA, 32), (GroupKind.SLIDING, 7)])
    96
    """
    found = [tokens for kind, tokens in blocks if attends_to_all(kind)]
    return lcm(*found) if found else 0


def load_plans(
    answers: Sequence[tuple[Source, Answer]], local_tokens: int, alignment_tokens: int
) -> list[LoadPlan]:
    """Return all plans to load the prefix of a request: those with one source first, then those with two.

    Args:
        answers: sources that may be able to serve the request, and their answers.
        local_tokens: number of the request's tokens in the engine's own prefix cache.
        alignment_tokens: alignment of the position where two sources' parts may meet, in tokens
            (`common_alignment`); 0 for no plans with two sources.
    """
    found = [LoadPlan(bid, ((source, bid),)) for source, answer in answers for bid in answer.bids]
    if len(answers) > 1 and alignment_tokens:
        found += _composed(answers, local_tokens, alignment_tokens)
    return found


def _composed(
    answers: Sequence[tuple[Source, Answer]], local_tokens: int, alignment_tokens: int
) -> Iterator[LoadPlan]:
    for first, of_first in answers:
        if (head := of_first.head(alignment_tokens)) is None:
            continue
        for last, of_last in answers:
            tail = of_last.tail(local_tokens + head.tokens) if last is not first else None
            if tail is not None:
                yield LoadPlan(Bid.composed(head, tail), ((first, head), (last, tail)))
