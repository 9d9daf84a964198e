"""Loads under way: what the workers are told of them, and the blocks that they may write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.connector.bids import Bid, trim_parts
from kvferry.connector.engine import Block, CacheGroup, Request, RequestBlocks
from kvferry.connector.events import LoadBegan
from kvferry.connector.load import Load
from kvferry.connector.messages import StepOrders
from kvferry.connector.source import Feed, Source
from kvferry.connector.stream import short_id
from kvferry.connector.transfer import Transfer, TransferBook
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan, max_writable_blocks, writable_blocks
from kvferry.terminal import shown


@dataclass(slots=True, eq=False, kw_only=True)
class RunningLoad(Transfer):
    """A load that may still write to its blocks.

    Attributes:
        load: the load as sent to the workers.
        source: source of the load.
        feed: what brings the KV to the workers.
        began: event of the load's start.
        told: True if the workers know of the load.
        fed: True if no more parts come from the feed.
        useless: reason to give the load up, which the workers are to be told; None if there is none.
        given_up: True if this load was dropped because another load of the same attempt failed.
    """

    load: Load
    source: Source
    feed: Feed
    began: LoadBegan
    told: bool = False
    fed: bool = False
    useless: str | None = None
    given_up: bool = False


class RunningLoads:
    """Begins loads, and tells the workers about them. Only the engine's thread calls it."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        book: TransferBook[RunningLoad],
        timeout_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """Create the object. No load runs yet.

        Args:
            groups: the engine's KV cache groups.
            book: the loads that are not over.
            timeout_seconds: seconds after its start at which an unfinished load counts as failed.
            clock: function that returns monotonic seconds.
        """
        self._groups, self._book = tuple(groups), book
        self._timeout, self._clock = timeout_seconds, clock
        # The loads about which the workers are to be told something, now or later.
        self._agenda: dict[str, RunningLoad] = {}
        self._attempts = 0

    @property
    def calm(self) -> bool:
        """True if there is nothing to tell the workers, now or later."""
        return not self._agenda

    def begin(
        self, request: Request, blocks: RequestBlocks, parts: Sequence[tuple[Source, Bid, LoadSpan]]
    ) -> list[RunningLoad]:
        """Begin a load for each part of an attempt to load a request's prefix, and pin the blocks they write.

        Args:
            request: the request.
            blocks: all blocks of the request.
            parts: (source, bid, range of prompt tokens) of each load.
        """
        self._attempts += 1
        attempt = f"{shown(request.request_id)}#{self._attempts}"
        found = []
        for number, (source, bid, span) in enumerate(parts):
            load = Load(
                key=f"{attempt}.{number}",
                request_id=request.request_id,
                attempt=attempt,
                loads=len(parts),
                bid=bid,
                span=span,
                tables=self._tables(blocks, span),
                timeout_seconds=self._timeout,
                began=self._clock(),
            )
            one = RunningLoad(
                key=load.key,
                holder=load.source,
                blocks=self._written(span, blocks.blocks),
                load=load,
                source=source,
                feed=source.begin(load, request),
                began=_began(source, load),
            )
            self._book.begin(one)
            self._agenda[load.key] = one
            found.append(one)
        return found

    def give_up(self, one: RunningLoad, reason: str) -> None:
        """Tell the workers not to go on with a load.

        Args:
            one: load whose result is of no use any more.
            reason: reason that the workers report.
        """
        one.given_up |= one.report is None or one.report.failure is None
        one.useless = reason
        self._agenda[one.key] = one

    def take_orders(self, orders: StepOrders) -> None:
        """Tell the workers what to do for loads in the coming step, and which loads to give up.

        Args:
            orders: message to the workers for the coming step. This object is mutated.
        """
        for one in list(self._agenda.values()):
            if not one.told:
                orders.loads.append(one.load)
                one.told = True
            if one.useless is not None:
                orders.given_up[one.key], one.useless = one.useless, None
            if not one.fed:
                orders.parts += (parts := one.feed.next_parts())
                one.fed = any(part.ends for part in parts)
            if one.fed:
                del self._agenda[one.key]

    def ended(self, one: RunningLoad) -> None:
        """Ask a load's feed for nothing more, because all workers have reported the load."""
        one.fed = True
        self._agenda.pop(one.key, None)

    def max_written_blocks(self, span: LoadSpan) -> int:
        """Return the maximum number of blocks that a load may write, over all KV cache groups.

        Args:
            span: range of prompt tokens to load.
        """
        return sum(max_writable_blocks(one, span) for one in self._groups)

    def _written(self, span: LoadSpan, blocks: Sequence[Sequence[Block]]) -> list[Block]:
        """Return every block that a load may write.

        Args:
            span: range of prompt tokens to load.
            blocks: all blocks of the load's request by block position, per KV cache group.
        """
        return [
            block
            for group, of_group in zip(self._groups, blocks, strict=True)
            for block in of_group[writable_blocks(group, span)]
            if not block.is_null
        ]

    def _tables(self, blocks: RequestBlocks, span: LoadSpan) -> tuple[Int64s, ...]:
        """Return the block table that a load writes, for each KV cache group."""
        ids = zip(self._groups, blocks.get_block_ids(), strict=True)
        return tuple(np.array(group.table(of_group, span.total), np.int64) for group, of_group in ids)


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
