"""What the two halves say to each other, once per engine step.

The engine carries these within itself (pickled between its own processes); nothing here comes from a peer
unchecked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.cache.orders import ChunkOrders, MovedByAll
from kvferry.engines.vllm.built import Built
from kvferry.engines.vllm.compat.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from kvferry.engines.vllm.config import ConnectorConfig
from kvferry.geometry import RankGeometry
from kvferry.planning.select import LoadSpan
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import RankCard

BlockIds = tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class WorkerCard(KVConnectorHandshakeMetadata):
    """What a worker tells its scheduler at start.

    Attributes:
        geometry: where its pages lie.
        card: what peers will need to read from it; None if there are none.
        settings: of its connector, as on any machine, which tell it from another of the engine.
        built: facts of its models.
        key: fingerprint of its key; None if it exchanges no KV.
    """

    geometry: RankGeometry
    card: RankCard | None
    settings: ConnectorConfig
    built: Built = field(default_factory=Built)
    key: str | None = None


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One load, for every worker.

    Attributes:
        key: names this attempt.
        request_id: vLLM's.
        peer: name of the peer, connected before.
        span: how much of the prompt.
        src_tables, dst_tables: block ids by position per group of each side.
        lease: the word of the producer's lease.
        timeout_seconds: when to give up, counted from when the worker takes the order.
        attempt, loads: what the request waits for, and of how many loads it consists.
    """

    key: str
    request_id: str
    peer: str
    span: LoadSpan
    src_tables: BlockIds
    dst_tables: BlockIds
    lease: LeaseWord
    timeout_seconds: float
    attempt: str
    loads: int


@dataclass(slots=True)
class SchedulerMeta(KVConnectorMetadata):
    """Scheduler half to worker halves.

    Attributes:
        engine_id: whose step this is.
        connects: peer name to the cards of its ranks, before the first order for it.
        disconnects: peers that nothing has been read from for a while.
        orders: loads to begin.
        given_up: loads that are of no use any more, and why: reported at once, if they have not been.
        ended: request to lease slot; raise the word, then report the request as sent.
        turns_ended: the same of turns that were kept; raise the word, then say so.
        saves: (block ids by position per group, tokens) of prompts this step completes, to be copied to
            the host buffer.
        chunks: what to do with chunks of the tiers.
        epoch: how often the engine's caches were reset before this step was scheduled.
        computes: the step computes tokens.
    """

    engine_id: str
    connects: dict[str, tuple[RankCard, ...]] = field(default_factory=dict)
    disconnects: list[str] = field(default_factory=list)
    orders: list[LoadOrder] = field(default_factory=list)
    given_up: dict[str, str] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    turns_ended: dict[str, int] = field(default_factory=dict)
    saves: list[tuple[BlockIds, int]] = field(default_factory=list)
    chunks: ChunkOrders = field(default_factory=ChunkOrders)
    epoch: int = 0
    computes: bool = False

    @property
    def works(self) -> bool:
        """Whether the step brings KV into the cache, from anywhere."""
        return self.computes or bool(self.orders or self.chunks.begins)


@dataclass(frozen=True, slots=True)
class Report:
    """How a load ended on one worker, or on all of them together.

    Attributes:
        failure: None if it succeeded.
        late: reported at its deadline; its memory is not free yet.
        bytes_by_group: useful bytes per group.
        pages, descriptors, run_bytes: prepared descriptors, what is left of them merged, the largest run.
        plan_seconds, transfer_seconds, check_seconds: the slowest worker's.
        strategy_by_group: how the bytes of each group travelled; empty where none did.
        peer_lost: what failed says that the peer has gone, or is another by now.
    """

    failure: str | None
    late: bool = False
    bytes_by_group: tuple[int, ...] = ()
    pages: int = 0
    descriptors: int = 0
    run_bytes: int = 0
    plan_seconds: float = 0.0
    transfer_seconds: float = 0.0
    check_seconds: float = 0.0
    strategy_by_group: tuple[str, ...] = ()
    peer_lost: bool = False

    @property
    def outcome(self) -> str:
        """``ready``, ``expired`` at its deadline, or ``failed``."""
        return "ready" if self.failure is None else "expired" if self.late else "failed"

    def with_other(self, other: Report) -> Report:
        """Two workers' reports of one load as one."""
        longer = self.bytes_by_group or (0,) * len(other.bytes_by_group)
        others = other.bytes_by_group or (0,) * len(longer)
        return Report(
            self.failure or other.failure,
            self.late or other.late,
            tuple(a + b for a, b in zip(longer, others, strict=True)),
            self.pages + other.pages,
            self.descriptors + other.descriptors,
            max(self.run_bytes, other.run_bytes),
            max(self.plan_seconds, other.plan_seconds),
            max(self.transfer_seconds, other.transfer_seconds),
            max(self.check_seconds, other.check_seconds),
            _ways(self.strategy_by_group, other.strategy_by_group),
            self.peer_lost or other.peer_lost,
        )


def _ways(ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[str, ...]:
    """Strategies of two workers by group, each named once."""
    if not ours or not theirs:
        return ours or theirs
    pairs = zip(ours, theirs, strict=True)
    return tuple("+".join(dict.fromkeys(filter(None, (*a.split("+"), *b.split("+"))))) for a, b in pairs)


@dataclass(slots=True)
class WorkerMeta(KVConnectorWorkerMetadata):
    """Worker halves to scheduler half.

    Attributes:
        reports: load to its report; every worker reports every load once.
        released: load to how many workers have nothing of it in flight any more.
        reported: load to how many workers' reports are merged in `reports`.
        moved: order to what became of it: chunks stored, or parts of loads.
        raised: turn that was kept to how many workers have raised its lease word.
        stale: the weights have changed: the last epoch that has seen other ones; None if they have not.
    """

    reports: dict[str, Report] = field(default_factory=dict)
    reported: dict[str, int] = field(default_factory=dict)
    released: dict[str, int] = field(default_factory=dict)
    moved: dict[str, MovedByAll] = field(default_factory=dict)
    raised: dict[str, int] = field(default_factory=dict)
    stale: int | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge another worker's into this one."""
        assert isinstance(other, WorkerMeta)
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
        return self

    def __bool__(self) -> bool:
        """There is something to say."""
        return bool(self.reports or self.released or self.moved or self.raised or self.stale is not None)
