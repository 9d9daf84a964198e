"""Messages between the scheduler half and the worker halves, once per engine step.

The engine pickles them between its own processes. Nothing in them comes from a peer unchecked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.connector.config import ConnectorConfig
from kvferry.connector.engine import BlockIds
from kvferry.connector.load import Load
from kvferry.connector.load_results import NO_FIGURES, LoadFigures
from kvferry.connector.worker.orders import ChunkOrders, MovedByAll
from kvferry.geometry import RankGeometry
from kvferry.transport.messages import RankCard
from kvferry.transport.read_order import ReadOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker tells its scheduler at start.

    Attributes:
        geometry: where its pages lie.
        card: what peers need to read from it; None if it exchanges no KV.
        settings: settings of its connector without this machine's address; they tell several connectors of
            an engine apart.
        key: fingerprint of its key; None if it exchanges no KV.
    """

    geometry: RankGeometry
    card: RankCard | None
    settings: ConnectorConfig
    key: str | None = None


@dataclass(slots=True, kw_only=True)
class StepOrders:
    """Orders of the scheduler half to the worker halves, for one step.

    Attributes:
        connects: cards of the ranks of each peer that is read from for the first time.
        disconnects: peers that nothing has been read from for a while.
        loads: loads that begin, from any source.
        reads: what to read from peers for `loads`, by the same key.
        given_up: loads that nobody waits for any more, and why; workers report them at once.
        ended: lease slot by request; raise the lease word, then report the request as sent.
        turns_ended: lease slot by kept turn; raise the lease word, then report it in `StepReports.raised`.
        saves: (block ids by position per group, tokens) of prompts that this step completes; copy them to
            the host buffer.
        chunks: orders about chunks of the tiers.
        epoch: number of resets of the engine's caches before this step was scheduled.
        computes: the step computes tokens.
    """

    connects: dict[str, tuple[RankCard, ...]] = field(default_factory=dict)
    disconnects: list[str] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    reads: list[ReadOrder] = field(default_factory=list)
    given_up: dict[str, str] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    turns_ended: dict[str, int] = field(default_factory=dict)
    saves: list[tuple[BlockIds, int]] = field(default_factory=list)
    chunks: ChunkOrders = field(default_factory=ChunkOrders)
    epoch: int = 0
    computes: bool = False

    @property
    def writes_cache(self) -> bool:
        """Whether the step computes KV or begins to load it."""
        return self.computes or bool(self.loads)


@dataclass(frozen=True, slots=True)
class Report:
    """The end of a load on one worker, or on all of them together.

    Attributes:
        failure: why it failed; None if it succeeded.
        late: it is reported at its deadline, and its memory is not free yet.
        peer_lost: the failure means that the peer has gone, or was restarted.
        figures: amounts and times.
    """

    failure: str | None
    late: bool = False
    peer_lost: bool = False
    figures: LoadFigures = NO_FIGURES

    @property
    def outcome(self) -> str:
        """``ready``, ``failed``, or ``expired`` at its deadline."""
        return "ready" if self.failure is None else "expired" if self.late else "failed"

    def with_other(self, other: Report) -> Report:
        """Return two workers' reports of one load as one."""
        return Report(
            self.failure or other.failure,
            late=self.late or other.late,
            peer_lost=self.peer_lost or other.peer_lost,
            figures=self.figures.with_other(other.figures),
        )


@dataclass(slots=True, kw_only=True)
class StepReports:
    """Reports of worker halves to the scheduler half, after one step.

    Attributes:
        reports: report by load; every worker reports every load once.
        reported: number of workers whose reports are merged in `reports`, by load.
        released: number of workers that have nothing of a load in flight any more, by load.
        moved: what became of each order about chunks.
        raised: number of workers that have raised the lease word, by kept turn.
        stale: the last epoch that has seen other weights; None if weights have not changed.
    """

    reports: dict[str, Report] = field(default_factory=dict)
    reported: dict[str, int] = field(default_factory=dict)
    released: dict[str, int] = field(default_factory=dict)
    moved: dict[str, MovedByAll] = field(default_factory=dict)
    raised: dict[str, int] = field(default_factory=dict)
    stale: int | None = None

    def add(self, other: StepReports) -> None:
        """Merge another worker's reports into these."""
        for key, report in other.reports.items():
            self.reports[key] = self.reports[key].with_other(report) if key in self.reports else report
        for key, moved in other.moved.items():
            self.moved[key] = self.moved[key].with_other(moved) if key in self.moved else moved
        for mine, theirs in (
            (self.reported, other.reported),
            (self.released, other.released),
            (self.raised, other.raised),
        ):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        if other.stale is not None:
            self.stale = max(other.stale, -1 if self.stale is None else self.stale)

    def __bool__(self) -> bool:
        """Return whether there is anything to report."""
        return bool(self.reports or self.released or self.moved or self.raised or self.stale is not None)


@dataclass(frozen=True, slots=True)
class EndedRequests:
    """Requests whose transfers have ended on one worker since the last step.

    Attributes:
        sent: their lease words are raised, so their blocks may be freed.
        received: all their loads are reported.
        failed: of those, the ones of which a load has failed.
    """

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
