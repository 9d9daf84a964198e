"""Transfers under way: the blocks that they keep allocated, and the workers' reports on them.

A transfer is a load or a store. Every block that it may read or write is pinned: the block stays allocated
until nothing of the transfer is in flight on any worker, even if its request ends before.

    begin ──every worker has reported──▶ reported ──nothing in flight on any──▶ over
      └───────request goes on or ends without it: late──────────────▲

The blocks of late loads are counted per source and bounded. Any load in flight may become late, so a load
begins only if all loads together, in flight and late, stay below the bound (`may_hold`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from kvferry.common.text import shown
from kvferry.connector.engine import Block, BlockPool, CacheGroup, Request, RequestBlocks
from kvferry.connector.events import LoadBegan, short_id
from kvferry.connector.load import Bid, Load, trim_parts
from kvferry.connector.messages import Report, StepOrders, StepReports
from kvferry.connector.source import Feed, Source
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan, max_writable_blocks, writable_blocks


def may_hold(source: str, blocks: int, held: Mapping[str, int], most: int) -> bool:
    """Return whether a load from a source may begin, given the blocks that all loads may still write.

    All sources together may hold at most `most` blocks. Each source may hold at most half of the blocks that
    the others leave, so sources that hang always leave room for another source. While no other load holds
    blocks, a load may be of any size, so that long prompts can be loaded too.

    >>> may_hold("a", 8, {}, 8)  # no other load holds blocks
    True
    >>> may_hold("a", 4, {"a": 1}, 8)  # 1 + 4 blocks are more than half of 8
    False
    >>> may_hold("b", 2, {"a": 4}, 8)  # "a" leaves 4 blocks, and 2 are half of them
    True

    Args:
        held: number of blocks that loads hold, by source, with those of late loads.
    """
    others = sum(held.values()) - held.get(source, 0)
    alone = not any(held.values())
    return alone or held.get(source, 0) + blocks <= (most - others) // 2


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """A load or a store under way. Mutable.

    Attributes:
        key: unique name.
        holder: who answers for the blocks: for a load, the peer's name or ``tiers``.
        blocks: blocks that it may read or write.
        report: merged report of the workers that have reported; None before the first.
        late: True if its request no longer waits, while it may still write to its blocks.
        landed: number of workers on which nothing of it is in flight any more.
    """

    key: str
    holder: str
    blocks: Sequence[Block]
    report: Report | None = None
    late: bool = False
    landed: int = 0


TransferT = TypeVar("TransferT", bound=Transfer)


class TransferBook(Generic[TransferT]):
    """The transfers of one kind that are not over. Only the engine's thread calls it.

    Attributes:
        pinned: number of blocks that they pin, counted for each transfer.
    """

    def __init__(self, workers: int, pool: BlockPool) -> None:
        """Begin without transfers."""
        self._workers, self._pool = workers, pool
        self._transfers: dict[str, TransferT] = {}
        # Counted, because a step may order many stores while hundreds are under way.
        self.pinned = 0

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[TransferT]:
        return iter(self._transfers.values())

    def __contains__(self, key: str) -> bool:
        return key in self._transfers

    def __getitem__(self, key: str) -> TransferT:
        return self._transfers[key]

    def begin(self, transfer: TransferT) -> None:
        """Pin the blocks of a transfer, and remember it until it is over.

        Raises:
            ValueError: a transfer of this name is under way.
        """
        if transfer.key in self._transfers:
            raise ValueError(f"transfer {transfer.key!r} has begun already")
        self._pool.touch(transfer.blocks)
        self._transfers[transfer.key] = transfer
        self.pinned += len(transfer.blocks)

    def add_report(self, key: str, report: Report) -> TransferT | None:
        """Merge a report into that of its transfer. Return the transfer if all workers have reported it now.

        Its blocks stay pinned until `release`.
        """
        one = self._transfers[key]
        one.report = report if one.report is None else one.report.with_other(report)
        one.late |= bool(report.late)
        return one if one.report.workers == self._workers else None

    def release(self, reports: StepReports) -> None:
        """Unpin the blocks of transfers of which nothing is in flight on any worker any more.

        Call this once for each message of the workers, after `add_report` for its reports.
        """
        for key, report in reports.reports.items():
            self.end(key, report.workers - report.late)
        for key, workers in reports.released.items():
            self.end(key, workers)

    def end(self, key: str, workers: int) -> bool:
        """Record that nothing of a transfer is in flight any more on so many further workers.

        Return True if the transfer is over now, and its blocks are unpinned. A name of another book is
        ignored.
        """
        if (one := self._transfers.get(key)) is None:
            return False
        one.landed += workers
        if one.landed < self._workers:
            return False
        del self._transfers[key]
        self.pinned -= len(one.blocks)
        # In reverse, so that the first blocks of a prompt are evicted last.
        self._pool.free_blocks(reversed(one.blocks))
        return True

    @property
    def held(self) -> Mapping[str, int]:
        """Number of pinned blocks, by holder. A holder without any is absent."""
        found = Counter[str]()
        for one in self:
            found[one.holder] += len(one.blocks)
        return +found

    def late_blocks(self, holder: str | None = None) -> int:
        """Return the number of blocks that late transfers of one holder pin, or those of all."""
        return sum(len(one.blocks) for one in self if one.late and holder in {None, one.holder})


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
            clock: function that returns monotonic seconds.
        """
        self._groups, self._book = tuple(groups), book
        self._timeout, self._clock = timeout_seconds, clock
        # The loads about which the workers are to be told something, now or later.
        self._agenda: dict[str, RunningLoad] = {}
        self._attempts = 0

    @property
    def agenda(self) -> tuple[Sized, ...]:
        return (self._agenda,)

    def begin(
        self, request: Request, blocks: RequestBlocks, parts: Sequence[tuple[Source, Bid, LoadSpan]]
    ) -> list[RunningLoad]:
        """Begin a load for each part of an attempt to load a prefix, and pin the blocks they write."""
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
        """Tell the workers not to go on with a load, for a reason that they report."""
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
                orders.parts += (parts := one.feed.next_parts())
                one.fed = any(part.ends for part in parts)
            if one.fed:
                del self._agenda[one.key]

    def ended(self, one: RunningLoad) -> None:
        """Ask a load's feed for nothing more, because all workers have reported the load."""
        one.fed = True
        self._agenda.pop(one.key, None)

    def max_written_blocks(self, span: LoadSpan) -> int:
        """Return the maximum number of blocks that a load of these tokens may write, over all groups."""
        return sum(max_writable_blocks(one, span) for one in self._groups)

    def _written(self, span: LoadSpan, blocks: Sequence[Sequence[Block]]) -> list[Block]:
        return [
            block
            for group, of_group in zip(self._groups, blocks, strict=True)
            for block in of_group[writable_blocks(group, span)]
            if not block.is_null
        ]

    def _tables(self, blocks: RequestBlocks, span: LoadSpan) -> tuple[Int64s, ...]:
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
