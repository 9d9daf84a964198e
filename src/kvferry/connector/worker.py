"""The connector's half on each rank: what the engine's hooks call in every step.

It exchanges values with the threads that read from peers (lanes) and with the thread that copies chunks
(`mover`). It never calls NIXL itself. It waits for these threads in one place, `WorkerHalf.ended`, and only
in a step of an engine that computes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from kvferry.common.errors import ConfigError, KVFerryError
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.loads import Loads
from kvferry.connector.messages import (
    ASLEEP,
    CHANGED,
    LEASE_SLOTS,
    MOVED,
    NOTHING_ENDED,
    EndedRequests,
    LoadOrder,
    LoadPart,
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
from kvferry.transport.read_plan import ReadOrder, Report
from kvferry.transport.security import read_keys
from kvferry.transport.transfers import Transfers


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
        self._idle, self._step_seconds = False, 0.0
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
            self._mover = ChunkMover(
                (geometry.pp_rank, geometry.tp_rank),
                self._arrived.set,
                engine_bytes=int(load_costs(config.costs).copy_engine_bytes),
                host=config.host,
                ports=parse_port_range(config.ports),
            )
        self._info = WorkerInfo(geometry=geometry, card=None)
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
        self._idle, self._step_seconds = orders.idle, orders.step_seconds
        if orders.writes_cache:
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
            self._transfers.submit(*reads, idle=self._idle)

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

        Also record the reports of these transfers for `take_reports`. If the engine computes nothing, wait
        for loads (`Loads.wait_until`).
        """
        # Stores end without a load: their reports are taken when the mover says so.
        if not (len(self._loads) or self._sent or self._arrived.is_set()):
            return NOTHING_ENDED
        self._take_results()
        if self._idle and len(self._loads):
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
            else:
                self._reports.released[load.key] = 1
            if one.served is not None:
                received.add(load.request_id)
            if one.served is False:
                failed.add(load.request_id)
        sent, self._sent = self._sent, set()
        return EndedRequests(frozenset(sent), frozenset(received), frozenset(failed))

    def _wait_for_results(self) -> None:
        began = self._clock()
        while (until := self._loads.wait_until(began, self._step_seconds)) is not None:
            if (left := until - self._clock()) <= 0:
                break
            self._arrived.wait(left)
            self._take_results()

    def _take_results(self) -> None:
        """Collect the results of the threads that read and copy."""
        self._arrived.clear()  # before results are taken: a result that arrives later sets it again
        for key, report in self._transfers.results() if self._transfers is not None else ():
            self._loads.on_part_ended(key, report, timed=self._idle)
        if self._mover is None:
            return
        self._reports.arenas |= self._mover.take_arenas()
        for key, report in self._mover.take_reports():
            self._reports.reports[key] = report
            # The source counts what was copied by the reports of the orders.
            self._loads.on_part_ended(key, Report(report.failure), timed=self._idle)

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
        verify=config.verify_transfers,
    )
