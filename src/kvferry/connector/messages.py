"""Messages that the scheduler half and the worker halves exchange once per engine step.

The engine pickles them between its own processes. Everything in them that comes from a peer has been checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.connector.bids import Bid
from kvferry.connector.engine import BlockIds
from kvferry.geometry import RankGeometry
from kvferry.geometry.canonical import CanonicalForm
from kvferry.memory.shared_memory import SharedFile
from kvferry.planning.chunk_cells import TableSlice
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan
from kvferry.tiers.paths import boot_id
from kvferry.tiers.shares.arena import FarArena
from kvferry.transport.messages import RankCard
from kvferry.transport.read_plan import ReadOrder, Report

# Reasons for which an engine exchanges no KV.
CHANGED = "the weights of this engine have changed since it was started"
MOVED = "the KV cache of this engine is no longer in the memory that was registered for transfers"
ASLEEP = "this engine sleeps: its KV cache has no memory"

LEASE_SLOTS = 8192
"""Maximum number of leases at a time. Each has a lease word in the registered memory of every worker."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk, and its position in the arena."""

    group: int  # index in `CanonicalForm.groups`
    number: int  # index in the prompt
    offset: int  # bytes


@dataclass(frozen=True, slots=True)
class MachineRanks:
    """The ranks of the engine on one machine. They share an arena."""

    ranks: tuple[RankGeometry, ...]
    share: CanonicalForm  # form of their share of each chunk
    # The handle by which a process attaches the arena; None until the first of the ranks has created it.
    arena: SharedFile | None

    @property
    def coordinates(self) -> list[tuple[int, int]]:
        """(pp_rank, tp_rank) of each rank."""
        return [(rank.pp_rank, rank.tp_rank) for rank in self.ranks]

    @property
    def name(self) -> str:
        """Return what messages call the machine: after its first rank."""
        return f"the machine of rank TP{self.ranks[0].tp_rank} PP{self.ranks[0].pp_rank}"


@dataclass(frozen=True, slots=True)
class ArenaCard:
    """The description of the arenas that ranks need before the first order."""

    machines: tuple[MachineRanks, ...]  # that of the scheduler first
    arena_bytes: int  # size of each arena


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """The order to copy chunks from KV blocks to host memory. Every rank copies and reports its part."""

    key: str
    pieces: tuple[Piece, ...]  # sorted by group, then by number
    # The slice of the request's block table that contains the blocks to copy, for each KV cache group of the
    # engine; None for groups without chunks in this order.
    tables: tuple[TableSlice | None, ...]
    # Range of prompt tokens that the blocks hold. If it begins or ends inside a chunk, the rest of the chunk
    # is filled with zeros.
    available: range


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """The order to copy a part of a load's chunks, which have arrived in host memory, to KV blocks."""

    key: str
    pieces: tuple[Piece, ...]  # sorted by group, then by number
    first: bool  # blocks that the load fills only in part are zeroed before


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """The description that a worker sends to the scheduler at start, and when the engine has slept.

    Attributes:
        card, key: what peers need to read the worker's KV cache, and the fingerprint of its secret key; None
            if the worker exchanges no KV.
    """

    geometry: RankGeometry
    card: RankCard | None
    key: str | None = None
    machine: str = field(default_factory=boot_id)  # boot id of the kernel that the worker runs on
    stale: int | None = None  # as in `StepReports`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """A load of the KV of a prompt prefix, or of a part of a prefix, from one source."""

    key: str  # name of the load, unique in this engine
    request_id: str
    attempt: str  # name of the attempt to load the prefix, which has one load, or two that each load a part
    loads: int  # number of loads of the attempt
    bid: Bid
    span: LoadSpan
    # Destination block table of each KV cache group, int64, indexed by block position. The table of a
    # recurrent state group has one entry, the block that receives the state snapshot.
    tables: tuple[Int64s, ...]
    timeout_seconds: float  # seconds from the time when a worker begins the load to its deadline
    began: float  # monotonic seconds in the scheduler's process

    @property
    def source(self) -> str:
        """Name of the source: the peer's name, or ``tiers``."""
        return self.bid.source


@dataclass(frozen=True, slots=True)
class LoadPart:
    """The next part of a load: what the workers do for it in one step.

    Parts follow each other as chunks arrive in host memory, or as a peer computes the prompt.
    """

    load: str  # its key
    work: ReadOrder | LoadOrder | None  # None if there is nothing to do yet, or nothing more will come
    last: bool = False
    failure: str | None = None  # why no more parts will come and the load has failed

    @property
    def ends(self) -> bool:
        return self.last or self.failure is not None


@dataclass(slots=True, kw_only=True)
class StepOrders:
    """The work of one engine step, from the connector's scheduler half to its worker halves.

    The slot of a lease is the index of its lease word. Workers *raise* (increment) the word when the lease
    ends. A peer that is still reading then notices that the blocks may be reused.
    """

    connects: dict[str, tuple[RankCard, ...]] = field(default_factory=dict)  # all ranks, by name of the peer
    disconnects: list[str] = field(default_factory=list)  # peers that no load has used for a while
    loads: list[Load] = field(default_factory=list)
    parts: list[LoadPart] = field(default_factory=list)  # of these and of earlier loads
    given_up: dict[str, str] = field(default_factory=dict)  # by load: why workers report it as failed at once
    # Slot of each ended lease, by request id. Workers raise the word, then report the request as sent. The
    # engine keeps the blocks until then.
    ended: dict[str, int] = field(default_factory=dict)
    # Slot of each ended lease on blocks that the engine does not keep for the lease (those of a prompt that
    # is still computed, and those of a kept turn), by lease name. Workers raise the word before the forward
    # pass, then report the lease in `StepReports.raised`.
    raised: dict[str, int] = field(default_factory=dict)
    # (block table per group, number of tokens) of each prompt whose computation this step completes. Workers
    # copy the prompt's blocks to the host buffer, from which peers read them.
    saves: list[tuple[BlockIds, int]] = field(default_factory=list)
    # Sent before the first copies, and again when the arenas of all machines are there.
    arena: ArenaCard | None = None
    stores: list[StoreOrder] = field(default_factory=list)  # to execute after the forward pass
    epoch: int = 0  # number of cache resets of the engine before this step was scheduled
    computes: bool = False
    # True if the engine computes nothing while workers execute this step, so that the step may wait for
    # loads.
    idle: bool = False
    step_seconds: float = 0.0  # of a step that computes a few tokens, for `idle`; 0 if unknown
    # True if the step computes tokens and workers have nothing else to do. All fields above but `epoch` and
    # `computes` then have their default values, and several steps may share one object.
    quiet: bool = False

    @property
    def writes_cache(self) -> bool:
        return self.computes or bool(self.loads)


@dataclass(slots=True, kw_only=True)
class StepReports:
    """Reports of worker halves to the scheduler half, after one step."""

    # Merged reports by key of the load, store, or order to copy a part of a load's chunks. Every worker
    # reports each of them once.
    reports: dict[str, Report] = field(default_factory=dict)
    # Number of workers on which nothing of a late load is in flight any more, by load key.
    released: dict[str, int] = field(default_factory=dict)
    # Number of workers that have raised the word of a lease in `StepOrders.raised`, by lease name.
    raised: dict[str, int] = field(default_factory=dict)
    # Number, from 0, of the last epoch in which the weights changed; None if they have not changed.
    stale: int | None = None
    moved: bool = False  # True if the KV cache of a worker has moved to memory that is not registered
    # The arenas that ranks have created on other machines than the scheduler's, or why they could not, by
    # index in `ArenaCard.machines`.
    arenas: dict[int, FarArena | str] = field(default_factory=dict)

    def add(self, other: StepReports) -> None:
        for key, report in other.reports.items():
            self.reports[key] = self.reports[key].with_other(report) if key in self.reports else report
        for mine, theirs in ((self.released, other.released), (self.raised, other.raised)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        if other.stale is not None:
            self.stale = max(other.stale, -1 if self.stale is None else self.stale)
        self.moved |= other.moved
        self.arenas |= other.arenas

    def __bool__(self) -> bool:
        stale = self.moved or self.stale is not None
        return bool(self.reports or self.released or self.raised or self.arenas or stale)


@dataclass(frozen=True, slots=True)
class EndedRequests:
    """Ids of requests whose transfers have ended on one worker since the last step."""

    sent: frozenset[str] = frozenset()  # the lease words are raised, so that the blocks may be freed
    received: frozenset[str] = frozenset()  # all loads have been reported
    failed: frozenset[str] = frozenset()  # those of them that have a failed load


NOTHING_ENDED = EndedRequests()
