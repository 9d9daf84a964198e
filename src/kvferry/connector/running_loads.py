"""Loads under way: what the workers are told of them and report, and the blocks that they may write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from kvferry.connector.bids import Bid
from kvferry.connector.engine import Block, BlockPool, CacheGroup, Request, RequestBlocks
from kvferry.connector.load import Load
from kvferry.connector.messages import Report, StepOrders, StepReports
from kvferry.connector.pins import Pins
from kvferry.connector.source import Feed, Source
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan, max_writable_blocks, writable_blocks
from kvferry.terminal import shown


@dataclass(slots=True, eq=False)
class RunningLoad:
    """The state of a load that not all workers have reported yet.

    Attributes:
        source: source of the load.
        load: the load as sent to the workers.
        feed: what brings the KV to the workers.
        given_up: True if this load was dropped because another load of the same attempt failed.
        reports: reports received so far. One report may combine several workers.
        reported: number of workers that have reported.
    """

    source: Source
    load: Load
    feed: Feed
    given_up: bool = False
    reports: list[Report] = field(default_factory=list)
    reported: int = 0

    def add_report(self, report: Report, workers: int) -> int:
        """Add a report on this load; return how many workers have reported the load so far.

        Args:
            report: report of one worker, or merged report of several.
            workers: number of workers that the report combines.
        """
        self.reports.append(report)
        self.reported += workers
        return self.reported

    def merged_report(self) -> Report:
        """Return one report that merges the reports of all workers on this load."""
        return reduce(Report.with_other, self.reports)


class RunningLoads:
    """The loads that not all workers have reported yet. Only the engine's thread calls it.

    Blocks that a load may write stay pinned in the engine's pool until every worker reports that nothing of
    the load is in flight, even if its request ends before.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        pins: Pins[Block],
        pool: BlockPool,
        workers: int,
        timeout_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """Create the object. No load runs yet.

        Args:
            groups: the engine's KV cache groups.
            pins: record of the KV blocks that loads may still write to.
            pool: the engine's block pool.
            workers: number of workers, each of which reports every load.
            timeout_seconds: seconds after its start at which an unfinished load counts as failed.
            clock: function that returns monotonic seconds.
        """
        self._groups, self._pins, self._pool = tuple(groups), pins, pool
        self._workers, self._timeout, self._clock = workers, timeout_seconds, clock
        self._loads: dict[str, RunningLoad] = {}
        self._begun: list[Load] = []
        self._fed: dict[str, Feed] = {}
        self._given_up: dict[str, str] = {}
        self._attempts = 0

    def __len__(self) -> int:
        """Return the number of loads that not all workers have reported yet."""
        return len(self._loads)

    def __getitem__(self, key: str) -> RunningLoad:
        """Return the load with this key."""
        return self._loads[key]

    def __contains__(self, one: RunningLoad) -> bool:
        """Return True if not all workers have reported this load."""
        return one.load.key in self._loads

    @property
    def calm(self) -> bool:
        """True if there is nothing to tell the workers, now or later."""
        return not (self._begun or self._fed or self._given_up)

    def begin(
        self, request: Request, blocks: RequestBlocks, parts: Sequence[tuple[Source, Bid, LoadSpan]]
    ) -> list[RunningLoad]:
        """Begin a load for each part of an attempt to load a request's prefix, and pin the blocks they write.

        Args:
            request: the request.
            blocks: all blocks of the request.
            parts: (source, bid, range of prompt tokens) of each load. A bid is the source's offer.
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
            self._pin(load, blocks.blocks)
            self._begun.append(load)
            self._loads[load.key] = one = RunningLoad(source, load, source.begin(load, request))
            self._fed[load.key] = one.feed
            found.append(one)
        return found

    def give_up(self, one: RunningLoad, reason: str) -> None:
        """Tell the workers not to go on with a load.

        Args:
            one: load whose result is of no use any more.
            reason: reason that the workers report.
        """
        one.given_up |= all(report.failure is None for report in one.reports)
        self._given_up[one.load.key] = reason

    def take_orders(self, orders: StepOrders) -> None:
        """Tell the workers what to do for loads in the coming step, and which loads to give up.

        Args:
            orders: message to the workers for the coming step. This object is mutated.
        """
        orders.loads, self._begun = self._begun, []
        for key, feed in list(self._fed.items()):
            orders.parts += (parts := feed.next_parts())
            if any(part.ends for part in parts):
                del self._fed[key]
        orders.given_up, self._given_up = self._given_up, {}

    def add_report(self, key: str, report: Report, workers: int) -> RunningLoad | None:
        """Add a report on a load. Return the load, and forget it, if all workers have reported it now.

        Args:
            key: key of the load.
            report: report of one worker, or merged report of several.
            workers: number of workers that the report combines.
        """
        if report.late:
            self._pins.mark_late(key)
        one = self._loads[key]
        if one.add_report(report, workers) < self._workers:
            return None
        self._fed.pop(key, None)
        return self._loads.pop(key)

    def release(self, reports: StepReports) -> None:
        """Unpin the blocks of loads of which nothing is in flight on any worker any more."""
        for key, workers in reports.released.items():
            if blocks := self._pins.on_transfer_ended(key, workers):
                self._pool.free_blocks(reversed(blocks))

    def max_written_blocks(self, span: LoadSpan) -> int:
        """Return the maximum number of blocks that a load may write, over all KV cache groups.

        Args:
            span: range of prompt tokens to load.
        """
        return sum(max_writable_blocks(one, span) for one in self._groups)

    def _pin(self, load: Load, blocks: Sequence[Sequence[Block]]) -> None:
        """Pin every block that a load may write: take a reference to the block in the engine's pool.

        Args:
            load: the load.
            blocks: all blocks of the load's request by block position, per KV cache group.
        """
        held = [
            block
            for group, of_group in zip(self._groups, blocks, strict=True)
            for block in of_group[writable_blocks(group, load.span)]
            if not block.is_null
        ]
        self._pool.touch(held)
        self._pins.hold(load.key, load.source, held)

    def _tables(self, blocks: RequestBlocks, span: LoadSpan) -> tuple[Int64s, ...]:
        ids = zip(self._groups, blocks.get_block_ids(), strict=True)
        return tuple(np.array(group.table(of_group, span.total), np.int64) for group, of_group in ids)
