"""What can give a request tokens that it need not compute: the seam between admission and its sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol

from kvferry.cache.bids import Bid, Bidding
from kvferry.engines.vllm.meta import BlockIds, Report, SchedulerMeta
from kvferry.observe.events import Lack, Miss, Moved
from kvferry.planning.select import Span


@dataclass(slots=True)
class Load:
    """What one source brings of a prefix: all of it, or a part.

    Attributes:
        key: names it, among all of this engine.
        request_id: vLLM's.
        attempt, loads: what the request waits for, and of how many loads it consists.
        bid: that was taken.
        span: how much of the prompt.
        tables: our block ids by position per group; of a state group the one block for the snapshot.
        began: seconds of the monotonic clock.
        given_up: another part of the prefix has failed, and nobody waits for this one.
        reports, reported: what workers have said, and how many have.
    """

    key: str
    request_id: str
    attempt: str
    loads: int
    bid: Bid
    span: Span
    tables: BlockIds
    began: float
    given_up: bool = False
    reports: list[Report] = field(default_factory=list)
    reported: int = 0

    @property
    def source(self) -> str:
        """Name of the source whose bid was taken."""
        return self.bid.source

    def hear(self, report: Report, workers: int) -> int:
        """So many more workers report the load, as one; how many have by now."""
        self.reports.append(report)
        self.reported += workers
        return self.reported

    def whole(self) -> Report:
        """All workers' reports as one."""
        return reduce(Report.with_other, self.reports)


class Source(Protocol):
    """One way to prefixes. The engine's thread calls it; nothing may wait.

    Attributes:
        name: what it is called in metrics.
    """

    name: str

    def arrived(self, request: Any, bidding: Bidding) -> bool:
        """A request has come in: whether this source might serve it. `bidding` is the request's."""

    def declined(self, request: Any) -> Lack | None:
        """Why a request that has `arrived` may not be served; None if it was not asked for."""

    def bids(self, request: Any, have: int) -> Sequence[Bid]:
        """What it offers beyond the `have` tokens that are here, in one way or more. May be asked again."""

    def lack(self, request: Any, have: int) -> Lack:
        """Why it has just bid nothing."""

    def head(self, request: Any, have: int, grain: int) -> Bid | None:
        """The beginning of a prefix, whose end another source has: of layers that see everything.

        Asked after `bids`, of the same request with the same tokens here.

        Args:
            request: vLLM's.
            have: tokens that are here.
            grain: it must end at a multiple of so many tokens.
        """

    def tail(self, request: Any, have: int, first: int) -> Bid | None:
        """The end of a prefix, of which another source brings the tokens before `first`. Asked as `head`."""

    def room(self, bid: Bid, blocks: int) -> bool:
        """Whether a load of a bid may begin now: its loads may be late, and hold `blocks` blocks for long."""

    def begin(self, load: Load, request: Any) -> None:
        """Its bid was taken: order the load."""

    def grains(self, load: Load) -> tuple[int, ...]:
        """Tokens per group of the engine: content begins at a multiple of it, the last before a window."""

    def origin(self, load: Load) -> str:
        """Where most of it comes from: ``peer``, or a tier's name."""

    def brought(self, load: Load, report: Report) -> tuple[Moved, ...]:
        """What a load has brought that all workers have reported. Asked once, before `ended`."""

    def blame(self, load: Load, report: Report) -> Miss:
        """What kind of failure a load's was. Asked before `ended`."""

    def ended(self, load: Load, report: Report) -> None:
        """All workers have reported a load of this source; if it failed, strike out what is to blame."""

    def dropped(self, load: Load) -> None:
        """Nobody waits for a load that is under way: its request has ended, or another part of it has failed.

        Workers still report it.
        """

    def settled(self, request_id: str) -> None:
        """The request has been served, or is computed: nothing is wanted of an offer any more."""

    def finished(self, request_id: str) -> None:
        """The request has ended: forget it."""

    def hand_over(self, meta: SchedulerMeta) -> None:
        """Give the workers what has been decided since the last step."""
