"""Messages that the scheduler half and the worker halves exchange once per engine step.

The engine pickles them between its own processes. Everything in them that comes from a peer has been checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.connector.config import ConnectorConfig
from kvferry.connector.engine import BlockIds
from kvferry.connector.load import Load
from kvferry.geometry import RankGeometry
from kvferry.memory.shared_memory import SharedFile
from kvferry.planning.chunk_cells import TableSlice
from kvferry.tiers.paths import boot_id
from kvferry.transport.messages import RankCard
from kvferry.transport.read_plan import NO_FIGURES, LoadFigures, ReadOrder


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk, and its position in the arena in bytes.

    `group` is the index of its KV cache group in `CanonicalForm.groups`, and `number` its index in the
    prompt.
    """

    group: int
    number: int
    offset: int


@dataclass(frozen=True, slots=True)
class ArenaCard:
    """The description of the arena that ranks need before the first order.

    `name` is the handle by which a process attaches the arena's memory, and `ranks` are all of the engine.
    """

    name: SharedFile
    ranks: tuple[RankGeometry, ...]
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """The order to copy chunks from KV blocks to host memory. Every rank copies and reports its part.

    Attributes:
        pieces: sorted by group, then by number.
        tables: the slice of the request's block table that contains the blocks to copy, for each KV cache
            group of the engine; None for groups without chunks in this order.
        available: range of prompt tokens that the blocks hold. If it begins or ends inside a chunk, the rest
            of the chunk is filled with zeros.
    """

    key: str
    pieces: tuple[Piece, ...]
    tables: tuple[TableSlice | None, ...]
    available: range


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """The order to copy a part of a load's chunks, which have arrived in host memory, to KV blocks.

    `pieces` are sorted by group, then by number. Before the first part of a load is copied, blocks that the
    load fills only in part are zeroed.
    """

    key: str
    pieces: tuple[Piece, ...]
    first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """The description that a worker sends to the scheduler at start, and when the engine has slept.

    Attributes:
        card: what peers need to read the worker's KV cache; None if the worker exchanges no KV.
        settings: without this machine's address. If an engine has several connectors, the settings tell which
            of them the worker belongs to.
        key: fingerprint of the worker's secret key; None if the worker exchanges no KV.
        machine: boot id of the kernel that the worker runs on.
        stale: as in `StepReports`.
    """

    geometry: RankGeometry
    card: RankCard | None
    settings: ConnectorConfig
    key: str | None = None
    machine: str = field(default_factory=boot_id)
    stale: int | None = None


@dataclass(frozen=True, slots=True)
class LoadPart:
    """The next part of a load: what the workers do for it in one step.

    The parts of a load follow each other as chunks arrive in host memory, or as a peer computes the prompt.
    If the KV is complete at the peer, the load has one part.

    Attributes:
        load: key of the load.
        work: None if there is nothing to do yet, although a peer has computed more, or if nothing more will
            come.
        failure: reason why no more parts will come and the load has failed.
    """

    load: str
    work: ReadOrder | LoadOrder | None
    last: bool = False
    failure: str | None = None

    @property
    def ends(self) -> bool:
        return self.last or self.failure is not None


@dataclass(slots=True, kw_only=True)
class StepOrders:
    """The work of one engine step, from the connector's scheduler half to its worker halves.

    The slot of a lease is the index of its lease word. Workers *raise* (increment) the word when the lease
    ends. A peer that is still reading then notices that the blocks may be reused.

    Attributes:
        connects: descriptions of all ranks of each peer to connect to, by peer name.
        disconnects: names of the peers that no load has used for a while.
        parts: parts of these and of earlier loads that begin with this step.
        given_up: reason why a request no longer waits for a load, by load key. Workers report these loads as
            failed at once.
        ended: slot of each ended lease, by request id. Workers raise the word, then report the request as
            sent. The engine keeps the blocks until then.
        raised: slot of each ended lease on blocks that the engine does not keep for the lease (those of a
            prompt that is still computed, and those of a kept turn), by lease name. Workers raise the word
            before the forward pass, then report the lease in `StepReports.raised`.
        saves: (block table per group, number of tokens) of each prompt whose computation this step completes.
            Workers copy the prompt's blocks to the host buffer, from which peers read them.
        arena: sent once, before the first copies; else None.
        stores: orders to execute after the step's forward pass.
        epoch: number of cache resets of the engine before this step was scheduled.
        computes: True if the step computes tokens.
        idle: True if the engine computes nothing while workers execute this step, so that the step may wait
            for loads.
        quiet: True if the step computes tokens and workers have nothing else to do. All fields above but
            `epoch` and `computes` then have their default values, and several steps may share one object.
    """

    connects: dict[str, tuple[RankCard, ...]] = field(default_factory=dict)
    disconnects: list[str] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    parts: list[LoadPart] = field(default_factory=list)
    given_up: dict[str, str] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    raised: dict[str, int] = field(default_factory=dict)
    saves: list[tuple[BlockIds, int]] = field(default_factory=list)
    arena: ArenaCard | None = None
    stores: list[StoreOrder] = field(default_factory=list)
    epoch: int = 0
    computes: bool = False
    idle: bool = False
    quiet: bool = False

    @property
    def writes_cache(self) -> bool:
        """True if the step computes KV or begins to load it."""
        return self.computes or bool(self.loads)

    @property
    def begins_nothing(self) -> bool:
        """True if workers have nothing to do before the forward pass, except for raising lease words."""
        return not (
            self.loads
            or self.parts
            or self.connects
            or self.disconnects
            or self.given_up
            or self.ended
            or self.arena
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The end of a load, of a store, or of a part that copies chunks, from one worker or merged from several.

    Attributes:
        failure: reason for the failure; None if it succeeded.
        late: number of workers that report a load before it has ended, because its deadline passed or it was
            given up. They may still write to its blocks.
        peer_lost: True if the failure means that the peer is gone or was restarted.
        workers: number of workers whose reports these are.
    """

    failure: str | None
    late: int = 0
    peer_lost: bool = False
    figures: LoadFigures = NO_FIGURES
    workers: int = 1

    @property
    def outcome(self) -> str:
        """``ready``, ``failed``, or ``expired`` if a load is late."""
        return "ready" if self.failure is None else "expired" if self.late else "failed"

    def with_other(self, other: Report) -> Report:
        """Merge this report with other workers' report about the same work."""
        return Report(
            self.failure or other.failure,
            late=self.late + other.late,
            peer_lost=self.peer_lost or other.peer_lost,
            figures=self.figures.with_other(other.figures),
            workers=self.workers + other.workers,
        )


@dataclass(slots=True, kw_only=True)
class StepReports:
    """Reports of worker halves to the scheduler half, after one step.

    Attributes:
        reports: merged reports by key of the load, store, or order to copy a part of a load's chunks. Every
            worker reports each of them once.
        released: number of workers on which nothing of a late load is in flight any more, by load key.
        raised: number of workers that have raised the word of a lease in `StepOrders.raised`, by lease name.
        stale: number, from 0, of the last epoch in which the weights changed; None if they have not changed.
        moved: True if the KV cache of a worker has moved to memory that is not registered.
    """

    reports: dict[str, Report] = field(default_factory=dict)
    released: dict[str, int] = field(default_factory=dict)
    raised: dict[str, int] = field(default_factory=dict)
    stale: int | None = None
    moved: bool = False

    def add(self, other: StepReports) -> None:
        """Merge reports of other workers into this object."""
        for key, report in other.reports.items():
            self.reports[key] = self.reports[key].with_other(report) if key in self.reports else report
        for mine, theirs in ((self.released, other.released), (self.raised, other.raised)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        if other.stale is not None:
            self.stale = max(other.stale, -1 if self.stale is None else self.stale)
        self.moved |= other.moved

    def __bool__(self) -> bool:
        stale = self.moved or self.stale is not None
        return bool(self.reports or self.released or self.raised or stale)


@dataclass(frozen=True, slots=True)
class EndedRequests:
    """Ids of requests whose transfers have ended on one worker since the last step.

    Attributes:
        sent: their lease words are raised, so that the blocks may be freed.
        received, failed: all their loads have been reported, and those that have a failed load.
    """

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


NOTHING_ENDED = EndedRequests()
