"""The sources of KV, peers and tiers: what they answer, the plans made of it, and their loads under way.

A source offers the KV of a prompt prefix as a *bid*. Admission takes the best bid, or two for the start and
the rest of the prefix. The *feed* of a load brings its KV to the workers in parts, as it becomes available.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from math import lcm
from typing import Protocol

import numpy as np

from kvferry.common.text import shown
from kvferry.connector.bids import Bid, trim_parts
from kvferry.connector.blocks import Transfer, TransferBook
from kvferry.connector.engine import Block, BlockPool, CacheGroup, Request
from kvferry.connector.events import GroupBytes, LoadBegan, MissReason, SourceMiss, short_id
from kvferry.connector.messages import Load, LoadPart, StepOrders
from kvferry.geometry import GroupKind
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan, attends_to_all, max_writable_blocks, writable_blocks
from kvferry.transport.read_plan import Report


def _no_part(_: int) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a source that was asked for a request. It is of use until the source is asked again."""

    bids: Sequence[Bid]
    # Returns why there are no bids. It may be slow.
    why_none: Callable[[], SourceMiss]
    # Returns an offer to load only the start of the prefix, of layers that attend to all tokens. The argument
    # is the alignment of its end, in tokens from the start of the prompt.
    head: Callable[[int], Bid | None] = _no_part
    # Returns an offer to load the rest of the prefix. The argument is the position of its first token.
    tail: Callable[[int], Bid | None] = _no_part


class Feed(Protocol):
    """What a source does for one load, from its beginning until all workers have reported it.

    The engine's thread calls it, so no method may block. Each report is the merged one of all workers.
    """

    @property
    def origin(self) -> str:
        """``peer``, or the name of the slowest tier that the load uses."""

    def next_parts(self) -> Sequence[LoadPart]:
        """Return what the workers do for the load in the coming step. Nothing follows a part that `ends`."""

    def drop(self) -> None:
        """Bring nothing more. What is in flight cannot be cancelled: the workers still report the end."""

    def moved(self, report: Report) -> tuple[GroupBytes, ...]:
        """Return what the load has copied."""

    def miss(self, report: Report) -> MissReason:
        """Return why the load has failed."""

    def ended(self, report: Report, *, wanted: bool) -> None:
        """Handle the end of the load, which all workers have reported. No other method is called any more.

        If it has failed, do not use its peer, or the tiers that were too slow, for its request again.

        Args:
            wanted: False if no request waits for the load any more, or it has failed in vain.
        """


class Source(Protocol):
    """A source of KV for prompt prefixes. The engine's thread calls it, so no method may block."""

    name: str  # in metrics

    def arrived(self, request: Request, excluded: dict[str, str]) -> bool:
        """Return whether this source may be able to load KV for a new request. If so, remember it.

        Args:
            excluded: `RequestState.excluded` of the request, to which the source may add.
        """

    def declined(self, request: Request) -> SourceMiss | None:
        """Return why `arrived` has refused a request; None for no reason to report."""

    def ask(self, request: Request, local_tokens: int) -> Answer:
        """Return what this source offers to load beyond the tokens in the engine's own prefix cache."""

    def has_room(self, bid: Bid, blocks: int) -> bool:
        """Return whether this source may begin a load that holds at most so many blocks."""

    def begin(self, load: Load, request: Request) -> Feed:
        """Begin to load KV from this source."""

    def alignments(self, request_id: str) -> tuple[int, ...]:
        """Return the multiple of tokens at which loaded KV begins, for each KV cache group."""

    def settled(self, request_id: str) -> None:
        """Release the leases on peers' blocks of a request that needs no more loads."""

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A plan to load the KV of a prompt prefix, from one source, or from two that load a part each."""

    bid: Bid  # offer to load the whole prefix
    source_bids: tuple[tuple[Source, Bid], ...]  # source and bid of each part, the start of the prompt first

    @property
    def last(self) -> Source:
        """The source that loads the last part of the prefix."""
        return self.source_bids[-1][0]

    def parts(self, local_tokens: int, load_tokens: int, prompt: int) -> list[tuple[Source, Bid, LoadSpan]]:
        """Return source, bid and range of prompt tokens of each part that is not loaded yet.

        The engine had `local_tokens` of the prefix when the plan was made, and lacks `load_tokens` now.
        """
        total, last = local_tokens + self.bid.tokens, local_tokens
        found = list[tuple[Source, Bid, LoadSpan]]()
        for source, bid in self.source_bids:
            first, last = last, last + bid.tokens
            part = (first, last) if len(self.source_bids) > 1 else None
            span = LoadSpan(total - load_tokens, total, prompt, part)
            if span.begins < span.ends:
                found.append((source, bid, span))
        return found


def common_alignment(blocks: Iterable[tuple[GroupKind, int]]) -> int:
    """Return the alignment, in tokens, of the position where the parts of a prefix from two sources meet.

    It is the common multiple of the blocks of the groups that attend to all tokens; 0 without such a group.

    >>> common_alignment([(GroupKind.FULL, 48), (GroupKind.MLA, 32), (GroupKind.SLIDING, 7)])
    96
    """
    found = [tokens for kind, tokens in blocks if attends_to_all(kind)]
    return lcm(*found) if found else 0


def load_plans(
    answers: Sequence[tuple[Source, Answer]], local_tokens: int, alignment_tokens: int
) -> list[LoadPlan]:
    """Return all plans to load the prefix of a request: those with one source first, then those with two.

    Two sources' parts meet at a multiple of `alignment_tokens`; 0 for one source only.
    """
    found = list[LoadPlan]()
    for source, answer in answers:
        for bid in answer.bids:
            found.append(LoadPlan(bid, ((source, bid),)))
    if len(answers) < 2 or not alignment_tokens:
        return found
    for first, of_first in answers:
        if (head := of_first.head(alignment_tokens)) is None:
            continue
        for last, of_last in answers:
            tail = None if last is first else of_last.tail(local_tokens + head.tokens)
            if tail is not None:
                found.append(LoadPlan(Bid.composed(head, tail), ((first, head), (last, tail))))
    return found


@dataclass(slots=True, eq=False, kw_only=True)
class RunningLoad(Transfer):
    """A load that may still write to its blocks."""

    load: Load  # the load as sent to the workers
    source: Source
    feed: Feed
    began: LoadBegan
    told: bool = False  # True if the workers know of the load
    fed: bool = False  # True if no more parts come from the feed
    # Reason to give the load up, which the workers are to be told; None if there is none.
    useless: str | None = None
    given_up: bool = False  # True if this load was dropped because another load of the same attempt failed


class RunningLoads(TransferBook[RunningLoad]):
    """The loads that may still write to their blocks. Begins them, and tells the workers about them."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        workers: int,
        pool: BlockPool,
        timeout_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(workers, pool)
        self._groups, self._timeout, self._clock = tuple(groups), timeout_seconds, clock
        # The loads about which the workers are to be told something, now or later.
        self._agenda: dict[str, RunningLoad] = {}
        self._attempts = 0

    @property
    def agenda(self) -> tuple[Sized, ...]:
        return (self._agenda,)

    def begin_all(
        self,
        request: Request,
        blocks: Sequence[Sequence[Block]],
        parts: Sequence[tuple[Source, Bid, LoadSpan]],
    ) -> list[RunningLoad]:
        """Begin a load for each part of an attempt to load a prefix, and pin the blocks they write.

        `blocks` are those of the request by position, for each KV cache group.
        """
        self._attempts += 1
        attempt = f"{shown(request.request_id)}#{self._attempts}"
        block_ids = [[block.block_id for block in of_group] for of_group in blocks]
        found = []
        for number, (source, bid, span) in enumerate(parts):
            tables, written = list[Int64s](), list[Block]()
            for group, of_group, ids in zip(self._groups, blocks, block_ids, strict=True):
                tables.append(np.array(group.table(ids, span.total), np.int64))
                for block in of_group[writable_blocks(group, span)]:
                    if not block.is_null:
                        written.append(block)
            load = Load(
                key=f"{attempt}.{number}",
                request_id=request.request_id,
                attempt=attempt,
                loads=len(parts),
                bid=bid,
                span=span,
                tables=tuple(tables),
                timeout_seconds=self._timeout,
                began=self._clock(),
            )
            one = RunningLoad(
                key=load.key,
                holder=bid.source,
                blocks=written,
                load=load,
                source=source,
                feed=source.begin(load, request),
                began=_began(source, load),
            )
            self.begin(one)
            self._agenda[load.key] = one
            found.append(one)
        return found

    def give_up(self, one: RunningLoad, reason: str) -> None:
        """Tell the workers not to go on with a load."""
        one.given_up |= one.report is None or one.report.failure is None
        one.useless = reason
        self._agenda[one.key] = one

    def take_orders(self, orders: StepOrders) -> None:
        """Add to `orders` what the workers do for loads in the coming step, and which loads to give up."""
        for one in list(self._agenda.values()):
            if not one.told:
                orders.loads.append(one.load)
                one.told = True
            if one.useless is not None:
                orders.given_up[one.key], one.useless = one.useless, None
            if not one.fed:
                for part in one.feed.next_parts():
                    orders.parts.append(part)
                    one.fed |= part.ends
            if one.fed:
                del self._agenda[one.key]

    def add_report(self, key: str, report: Report) -> RunningLoad | None:
        if (one := super().add_report(key, report)) is not None:
            one.fed = True
            self._agenda.pop(key, None)
        return one

    def max_written_blocks(self, span: LoadSpan) -> int:
        """Return the maximum number of blocks that a load of these tokens may write."""
        blocks = 0
        for group in self._groups:
            blocks += max_writable_blocks(group, span)
        return blocks


def _began(source: Source, load: Load) -> LoadBegan:
    bid, span = load.bid, load.span
    return LoadBegan(
        short_id(load.request_id),  # the event of the load's end holds this one
        load.began,
        load=load.key,
        source=source.name,
        peer=bid.source,
        # The engine may have found more tokens in its own cache than when the bid was made.
        parts=trim_parts(bid.parts, span.ends - span.begins),
        begin=span.begins,
        end=span.ends,
        attempt=load.attempt,
    )
