"""The connector's half on each rank: the loads of the rank, and what the engine's hooks call in every step.

It exchanges values with the threads that read from peers (lanes) and with the thread that copies chunks
(`mover`). It never calls NIXL itself. It waits for these threads in one place, `WorkerHalf.ended`, and only
in a step of an engine that computes nothing.

A load is carried out in parts, as its KV becomes available. It ends twice: for its request and for its
memory. When its deadline passes, it is reported as failed and the request goes on without it. But its KV
blocks belong to the parts in flight, however long they take.

    OPEN ─last part begun─▶ WHOLE ────┐
      ├─a part fails, no more come─▶ FAILING ─no part in flight─▶ READY or FAILED  (reported; memory free)
      └─any of them: deadline, or given up─▶ EXPIRED ─no part in flight─▶ RELEASED
                                      (reported; memory still held)       (memory free)

Only an OPEN load takes parts: blocks of the others may belong to other requests soon. A load is given up when
it has become useless, for example because the load of another part of the same prefix has failed. Each load
is reported exactly once, and released exactly once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from kvferry.common.errors import ConfigError, KVFerryError
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.messages import (
    ASLEEP,
    CHANGED,
    LEASE_SLOTS,
    MOVED,
    NOTHING_ENDED,
    EndedRequests,
    Load,
    LoadOrder,
    LoadPart,
    Report,
    StepOrders,
    StepReports,
    WorkerInfo,
)
from kvferry.connector.mover import ChunkMover
from kvferry.geometry import Group, RankGeometry
from kvferry.memory.device_stream import DeviceEvent
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan, blocks_needed
from kvferry.planning.strategy import Strategy
from kvferry.transport.addresses import parse_port_range
from kvferry.transport.costs import TransferSettings, load_costs
from kvferry.transport.lease import LeaseWords, new_incarnation
from kvferry.transport.read_plan import NO_FIGURES, LoadFigures, ReadOrder, ReadResult
from kvferry.transport.security import read_keys
from kvferry.transport.transfers import Transfers

# A peer that computes without end must not hold a request for ever.
MOST_TIMEOUTS = 20
"""Maximum time of a load whose KV a peer still computes, as a multiple of its timeout."""

LATE_SECONDS = 5.0
"""A load's failure says if `Loads.settle`, which steps call, was called so long after the deadline."""

# The engine would only sleep and look again. A request that arrives meanwhile is delayed by the wait.
IDLE_WAIT_SECONDS = 0.003
"""Maximum seconds that a step of an idle engine waits for a load under way to end."""

# Requests whose loads end in the same step are computed together, in about the time of one.
BURST_SECONDS, GAP_SECONDS = 0.010, 0.001
"""If a load has ended in such a step, maximum seconds of the whole wait, and until the next load ends."""


@dataclass(frozen=True, slots=True)
class _SettledLoad:
    """A load whose result is known, or whose memory is free, since the last call of `Loads.settle`."""

    load: Load
    report: Report | None  # None if it was reported before
    released: bool  # no part is in flight any more
    served: bool | None = None  # with the last report of an attempt: whether all its loads have succeeded


@dataclass(slots=True)
class _Running:
    """The state of a load that may still write to its blocks."""

    load: Load
    deadline: float  # seconds of the clock; the load is then reported as failed
    latest: float  # the deadline is not moved beyond it
    in_flight: int = 0  # parts that have begun and not ended
    whole: bool = False
    failure: str | None = None  # why a part has failed, or why no more will come
    given_up: str | None = None  # why the load is of no use any more
    void: str | None = None  # why the load has failed even if all its parts arrive
    reported: bool = False
    peer_lost: bool = False
    figures: LoadFigures = NO_FIGURES

    @property
    def is_open(self) -> bool:
        return not (self.whole or self.reported or self.failure or self.void)

    @property
    def has_landed(self) -> bool:
        return not (self.in_flight or self.is_open)


class Loads:
    """The loads of one worker that may still write to their blocks. Only the engine's thread calls it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loads: dict[str, _Running] = {}
        self._parts: dict[str, _Running] = {}
        self._attempts: dict[str, list[bool]] = {}  # success of the reported loads of each

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def under_way(self) -> bool:
        """Whether the result of a load is still to come."""
        return any(not (one.reported or one.has_landed) for one in self._loads.values())

    def begin(self, load: Load) -> None:
        """Add a load. It has no parts yet, and its timeout begins now."""
        if load.key in self._loads:
            raise ValueError(f"load {load.key!r} has begun already")
        now = self._clock()
        self._loads[load.key] = _Running(
            load, now + load.timeout_seconds, now + MOST_TIMEOUTS * load.timeout_seconds
        )

    def add(self, part: LoadPart) -> Load | None:
        """Add the next part of a load. Return the load if the part must be begun now; else None."""
        one = self._loads.get(part.load)
        # Blocks of a load that has ended may belong to another request soon, so it takes no more parts.
        if one is None or not one.is_open:
            return None
        one.whole, one.failure = part.last, part.failure
        # A part shows that the peer has computed more, so a slow prompt is no reason to give up. `latest` is
        # the bound.
        if one.load.bid.growing and part.failure is None:
            one.deadline = min(self._clock() + one.load.timeout_seconds, one.latest)
        if part.work is None:
            return None
        one.in_flight += 1
        self._parts[part.work.key] = one
        return one.load

    def on_part_ended(self, key: str, failure: str | None, read: ReadResult | None = None) -> None:
        """Record that nothing of a part, which may be none of a load, is in flight any more.

        `read` is its result if it was read from a peer.
        """
        if (one := self._parts.pop(key, None)) is None:
            return
        one.in_flight -= 1
        # The first failure is the cause. Later ones often follow from it.
        one.failure = one.failure or failure
        if read is not None:
            one.peer_lost |= read.peer_lost
            one.figures = one.figures.with_next(read.figures)

    def give_up(self, key: str, why: str) -> None:
        """Report a load as failed, unless all its parts have arrived."""
        if (one := self._loads.get(key)) is not None:
            one.given_up = one.given_up or why

    def invalidate(self, why: str, keys: Iterable[str] | None = None) -> None:
        """Report these loads, or all, as failed, even if their KV arrives."""
        for key in self._loads if keys is None else keys:
            if (one := self._loads.get(key)) is not None:
                one.void = one.void or why

    def settle(self) -> list[_SettledLoad]:
        """Return the loads that have ended, been given up or passed their deadline since the last call."""
        now, found = self._clock(), []
        for one in list(self._loads.values()):
            # Asked before the deadline: a load that has arrived in full is of use, however late this is
            # noticed.
            landed = one.has_landed
            failure = one.void or (one.failure if landed else one.given_up)
            if landed:
                del self._loads[one.load.key]
            elif failure is None and one.deadline <= now:
                failure = _expired(now - one.deadline)
            if one.reported:
                if landed:
                    found.append(_SettledLoad(one.load, None, released=True))
            elif landed or failure is not None:
                one.reported = True
                # Parts of a late load are still in flight, so its figures are not known yet.
                figures = one.figures if landed else NO_FIGURES
                report = Report(failure, int(not landed), peer_lost=one.peer_lost, figures=figures)
                results = self._attempts.setdefault(one.load.attempt, [])
                results.append(failure is None)
                served = None
                if len(results) == one.load.loads:
                    served = all(self._attempts.pop(one.load.attempt))
                found.append(_SettledLoad(one.load, report, released=landed, served=served))
        return found


def _expired(late_seconds: float) -> str:
    if late_seconds < LATE_SECONDS:
        return "its deadline passed"
    return (
        f"its deadline passed {late_seconds:.1f} s ago, and the engine made no step since: was the process "
        "or the machine stopped, or are there more busy processes than cores?"
    )


@dataclass(slots=True)
class StaleEpochs:
    """Record of the epochs whose KV must not be stored or loaded. Only the engine's thread calls it."""

    last: int | None = None  # last epoch in which the weights changed; None if never since the start
    moved: bool = False  # the KV cache is in memory that is not registered
    asleep: bool = False
    current: int = 0  # epoch of the last step that computes tokens or begins a load

    def __contains__(self, epoch: int) -> bool:
        return self.moved or self.asleep or (self.last is not None and epoch <= self.last)

    def __bool__(self) -> bool:
        """Return whether any epoch is stale, so that no KV may be exchanged with peers."""
        return self.moved or self.asleep or self.last is not None

    @property
    def reason(self) -> str:
        return MOVED if self.moved else ASLEEP if self.asleep else CHANGED

    def on_weights_changed(self) -> None:
        """Mark the epoch of the last such step as one in which the weights have changed."""
        # Before the first step this is epoch 0, whose keys are valid only for the weights at the engine's
        # start.
        self.last = self.current


class _CacheMirror(Protocol):
    """A copy of the KV cache in host memory, for a cache that cannot be registered with the transport."""

    def save(self, groups: Sequence[Group], blocks: Sequence[Int64s]) -> None:
        """Copy blocks, given by int64 ids for each group of the rank, from the KV cache to host memory."""

    def load(self, groups: Sequence[Group], blocks: Sequence[Int64s]) -> None:
        """Copy blocks from host memory to the KV cache."""


class WorkerHalf:
    """Does on one rank what the scheduler half wants done. Only the engine's thread calls it."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        transfers: Transfers | None = None,
        mover: ChunkMover | None = None,
        arrived: threading.Event | None = None,
    ) -> None:
        """Create a half without a KV cache. `start` must be called before any other method.

        Tests pass `transfers` and `mover`, which `start` creates, and `arrived`, which both set after each
        read or copy.
        """
        self._clock = clock
        self._info: WorkerInfo | None = None
        self._open: Callable[[], Transfers] | None = None
        self._mirror: _CacheMirror | None = None
        self._groups: Sequence[Group] = ()
        self._transfers, self._mover = transfers, mover
        self._loads, self._sent = Loads(clock), set[str]()
        self._stale = StaleEpochs()
        self._reports = StepReports()
        self._idle = False
        self._arrived = threading.Event() if arrived is None else arrived

    def start(
        self,
        engine_id: str,
        geometry: RankGeometry,
        config: ConnectorConfig,
        *,
        mirror: _CacheMirror | None = None,
        reads: bool = True,
    ) -> WorkerInfo:
        """Register the KV cache for transfers, and start the threads that read and copy. Return `info`.

        Args:
            geometry: memory layout of this rank's KV cache, or of `mirror` if there is one.
            mirror: copy of the cache in host memory; None if transfers access the cache itself.
            reads: True if this engine reads from peers.

        Raises:
            ConfigError: NIXL cannot start or cannot register the memory, a setting is invalid, or the secret
                key or the costs file cannot be read.
        """
        self._mirror, self._groups = mirror, geometry.groups
        if config.tiers:
            rank, engine_bytes = (
                (geometry.pp_rank, geometry.tp_rank),
                load_costs(config.costs).copy_engine_bytes,
            )
            self._mover = ChunkMover(rank, self._arrived.set, engine_bytes=int(engine_bytes))
        self._info = WorkerInfo(geometry=geometry, card=None, settings=config.without_host)
        if config.transfers:
            settings = _transfer_settings(config)
            self._info = replace(self._info, key=settings.keys.fingerprint)
            self._open = partial(self._open_transfers, engine_id, geometry, settings, reads=reads)
            self._transfers = self._open()
        return self.info

    def _open_transfers(
        self, engine_id: str, geometry: RankGeometry, settings: TransferSettings, *, reads: bool
    ) -> Transfers:
        words = LeaseWords(new_incarnation(), LEASE_SLOTS)
        if self._transfers is not None:
            words = self._transfers.words.renewed(LEASE_SLOTS)
        name = f"{engine_id}/{geometry.pp_rank}.{geometry.tp_rank}/{words.incarnation:x}"
        transfers = Transfers(name, geometry, words, settings, on_result=self._arrived.set)
        if reads:
            # Starts the process that validates peers' transport metadata before the first read.
            transfers.warm_up()
        return transfers

    @property
    def info(self) -> WorkerInfo:
        """Description of this rank for the scheduler, after `start`."""
        if self._info is None:
            raise KVFerryError("a worker half was used before `start`")
        card = None if self._transfers is None else self._transfers.card
        return replace(self._info, card=card, stale=self._stale.last)

    def fall_asleep(self) -> None:
        """Deregister the KV cache until `wake`, because the engine is about to give up its memory.

        Raise ConfigError if loads into the KV cache are under way.
        """
        if self._stale.asleep:
            return
        if len(self._loads):
            raise ConfigError(
                "KV is still loaded into the memory that this engine would give up; pause it first (/pause)"
            )
        if self._mover is not None:
            # Queued copies still read the KV cache. They end before its memory goes.
            self._mover.finish()
        self._stale.asleep = True
        if self._transfers is not None:
            self._transfers.close()

    def wake(self) -> None:
        """Register the KV cache anew, unless it is awake. `info` then has a new card for peers.

        Raise ConfigError if NIXL cannot register the memory.
        """
        if not self._stale.asleep:
            return
        if self._open is not None:
            self._transfers = self._open()
        self._stale.asleep = False
        # The weights changed, or the cache moved, before or during the sleep: the new words must not be valid
        # either.
        if self._stale:
            self._invalidate()

    def on_weights_changed(self) -> None:
        """Fail all loads ordered so far, and have peers reject the KV that they read from this rank."""
        self._stale.on_weights_changed()
        self._reports.stale = self._stale.last
        self._invalidate()

    def on_cache_moved(self) -> None:
        """Fail all loads and stores for good, because the KV cache has left the registered memory."""
        self._stale.moved = self._reports.moved = True
        self._invalidate()

    def _invalidate(self) -> None:
        self._loads.invalidate(self._stale.reason)
        if self._transfers is not None:
            self._transfers.words.invalidate_all()

    def raise_words(self, orders: StepOrders) -> None:
        """Raise the lease words of blocks that the step may write for another request.

        Call this before anything of the step writes to the cache: before its forward pass, and before the
        engine zeroes blocks.
        """
        if self._transfers is not None and orders.raised:
            self._transfers.words.end(orders.raised.values())
            self._reports.raised.update(dict.fromkeys(orders.raised, 1))

    def begin(self, orders: StepOrders) -> None:
        """Begin the work of a step that needs no KV that the step computes, before its forward pass."""
        self._idle = orders.idle
        if orders.quiet or orders.writes_cache:
            self._stale.current = orders.epoch
        if orders.quiet:
            return
        if self._transfers is not None:
            self._connect(self._transfers, orders)
        if self._mover is not None and orders.arena is not None:
            self._mover.attach(orders.arena)
        for load in orders.loads:
            self._loads.begin(load)
        if orders.loads and orders.epoch in self._stale:
            self._loads.invalidate(self._stale.reason, [load.key for load in orders.loads])
        self._begin_parts(orders.parts)
        for key, why in orders.given_up.items():
            self._loads.give_up(key, why)

    def _connect(self, transfers: Transfers, orders: StepOrders) -> None:
        for peer, cards in orders.connects.items():
            transfers.connect(peer, cards)
        for peer in orders.disconnects:
            transfers.disconnect(peer)
        if orders.ended:
            transfers.words.end(orders.ended.values())
            self._sent.update(orders.ended)

    def _begin_parts(self, parts: Sequence[LoadPart]) -> None:
        reads = []
        for part in parts:
            # Peers compare weights only at the handshake, so after a change nothing is read, in any epoch.
            if self._stale and isinstance(part.work, ReadOrder):
                self._loads.invalidate(self._stale.reason, [part.load])
            load = self._loads.add(part)
            if isinstance(part.work, LoadOrder):
                if load is None or self._mover is None:
                    self._reports.reports[part.work.key] = Report("its load has ended")
                else:
                    self._mover.load(load, part.work)
            elif load is not None and part.work is not None:
                reads.append(part.work)
        if reads and self._transfers is not None:
            self._transfers.submit(*reads)

    def save(self, orders: StepOrders, mark: Callable[[], DeviceEvent | None]) -> None:
        """Copy completed prompts to the host buffer, and start to store the step's chunks.

        Call this after the step's forward pass has been submitted, because prompts and chunks contain its KV.
        `mark` records an event on the device after the work submitted so far, and returns it; None if that
        work is done already.
        """
        if self._mirror is not None:
            for tables, tokens in orders.saves:
                arrays = [np.array(table, np.int64) for table in tables]
                self._mirror.save(self._groups, self._needed(LoadSpan(0, tokens, tokens + 1), arrays))
        if self._mover is None or not orders.stores:
            return
        stale = orders.epoch in self._stale
        computed = None if stale else mark()
        for order in orders.stores:
            if stale:
                self._reports.reports[order.key] = Report(self._stale.reason)
            else:
                self._mover.store(order, computed)

    def ended(self) -> EndedRequests:
        """Return the requests whose transfers have ended since the last call.

        Also record the reports of these transfers for `take_reports`. If the engine computes nothing, wait at
        most `IDLE_WAIT_SECONDS` for a load to end, and longer only while loads keep ending.
        """
        # Stores end without a load: their reports are taken when the mover says so.
        if not (len(self._loads) or self._sent or self._arrived.is_set()):
            return NOTHING_ENDED
        self._take_results()
        if self._idle:
            self._wait_for_results()
        if not (len(self._loads) or self._sent):
            return NOTHING_ENDED
        received, failed = set(), set()
        for one in self._loads.settle():
            load = one.load
            if one.report is not None:
                if one.report.failure is None and self._mirror is not None:
                    # Before the request is reported as served: the engine then computes with these blocks.
                    self._mirror.load(self._groups, self._needed(load.span, load.tables))
                self._reports.reports[load.key] = one.report
            elif one.released:
                self._reports.released[load.key] = 1
            if one.served is not None:
                received.add(load.request_id)
            if one.served is False:
                failed.add(load.request_id)
        sent, self._sent = self._sent, set()
        return EndedRequests(frozenset(sent), frozenset(received), frozenset(failed))

    def _wait_for_results(self) -> None:
        began = self._clock()
        until = began + IDLE_WAIT_SECONDS
        while self._loads.under_way and (left := until - self._clock()) > 0:
            self._arrived.wait(left)
            if self._take_results():
                until = min(began + BURST_SECONDS, self._clock() + GAP_SECONDS)

    def _take_results(self) -> bool:
        """Collect the results of the threads that read and copy. Return whether there was one."""
        self._arrived.clear()  # before results are taken: a result that arrives later sets it again
        found = False
        for result in self._transfers.results() if self._transfers is not None else ():
            found = True
            self._loads.on_part_ended(result.key, result.failure, result)
        for key, report in self._mover.take_reports() if self._mover is not None else ():
            found = True
            self._reports.reports[key] = report
            self._loads.on_part_ended(key, report.failure)
        return found

    def take_reports(self) -> StepReports | None:
        if not self._reports:
            return None
        reports, self._reports = self._reports, StepReports()
        return reports

    def shutdown(self) -> None:
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        if self._mover is not None:
            self._mover.close()
            self._mover = None

    def _needed(self, span: LoadSpan, tables: Sequence[Int64s]) -> list[Int64s]:
        return [blocks_needed(group, span, table) for group, table in zip(self._groups, tables, strict=True)]


def _transfer_settings(config: ConnectorConfig) -> TransferSettings:
    return TransferSettings(
        strategy=None if config.strategy == "auto" else Strategy(config.strategy),
        costs=load_costs(config.costs),
        staging_bytes=config.staging_mib << 20,
        host=config.host,
        advertise_host=config.advertise_host or config.host,
        keys=read_keys(config.secret_file),
        peers=config.allowed_peers(),
        ports=parse_port_range(config.ports),
        lanes=config.lanes,
    )
