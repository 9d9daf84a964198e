"""The worker half: what happens on each rank, inside the engine's hooks.

Hooks exchange values with the lanes that read and return; they never wait and never call NIXL.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from kvferry.cache.loads import Joined, Loads
from kvferry.cache.mover import ChunkMover
from kvferry.cache.orders import LoadBegin, MovedByAll
from kvferry.engines.vllm import layout
from kvferry.engines.vllm.access import peers_allowed
from kvferry.engines.vllm.built import built_of
from kvferry.engines.vllm.compat.contract import KVConnectorTransferResults
from kvferry.engines.vllm.compat.memory import keep_memory
from kvferry.engines.vllm.compat.process import after_forward, tensor_and_pipeline_rank
from kvferry.engines.vllm.compat.weights import hook_weight_changes
from kvferry.engines.vllm.config import ConnectorConfig, read_settings
from kvferry.engines.vllm.geometry import describe_cache
from kvferry.engines.vllm.host_buffer import CopyBlocks, HostBuffer
from kvferry.engines.vllm.meta import BlockIds, LoadOrder, Report, SchedulerMeta, WorkerCard, WorkerMeta
from kvferry.engines.vllm.producer import LEASE_SLOTS
from kvferry.engines.vllm.stale import CHANGED, StaleEpochs
from kvferry.geometry import RankGeometry
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan, blocks_needed
from kvferry.planning.strategy import Strategy
from kvferry.transport.costs_file import load_costs
from kvferry.transport.key_file import read_keys
from kvferry.transport.lane import ReadResult
from kvferry.transport.lease import LeaseWords, new_incarnation
from kvferry.transport.read_plan import ReadOrder
from kvferry.transport.settings import TransferSettings
from kvferry.transport.transfers import Transfers

logger = logging.getLogger(__name__)


class WorkerHalf:
    """One rank's cache, its transfers, and its loads.

    Attributes:
        engine_id: whose rank it is.
        layout: the memory layout of its cache.
    """

    def __init__(self, vllm_config: Any, caches: dict[str, Any]) -> None:
        """The engine has allocated its cache.

        Args:
            vllm_config: the engine's configuration.
            caches: layer name to its tensor.

        Raises:
            ConfigError: its model is not found.
        """
        self._vllm_config, self._caches = vllm_config, caches
        self._built = built_of(vllm_config)
        self.engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self.layout = "unknown"
        self._copy: CopyBlocks | None = None
        self._host: HostBuffer | None = None
        self._geometry: RankGeometry | None = None
        self._transfers: Transfers | None = None
        self._mover: ChunkMover | None = None
        self._loads, self._joined = Loads(time.monotonic), Joined()
        self._orders: dict[str, LoadOrder | LoadBegin] = {}
        self._results: dict[str, ReadResult] = {}
        self._sent: set[str] = set()
        self._stale, self._void = StaleEpochs(), set[str]()
        self._meta = WorkerMeta()
        hook_weight_changes(vllm_config, self._weights_change)
        keep_memory(vllm_config)

    def set_copy(self, copy: CopyBlocks) -> None:
        """The engine's copy operation, for the host buffer."""
        self._copy = copy

    def start(self, kv_cache_config: Any) -> WorkerCard:
        """Describe and register the cache, start the transfers.

        Returns:
            What peers will need to read from this rank.

        Raises:
            ConfigError: the cache cannot be moved, or NIXL cannot be used.
        """
        caches, settings = self._caches, read_settings(self._vllm_config)
        tp_rank, pp_rank = tensor_and_pipeline_rank()
        self.layout = layout.read_back(kv_cache_config, caches)
        layout.check_forced(self._vllm_config, settings, self.layout)
        if (tp_rank, pp_rank) == (0, 0):
            logger.info("KV cache layout %s (setting: %s)", self.layout, settings.layout)
        if settings.host_buffer:
            self._host = HostBuffer(caches, kv_cache_config.num_blocks, self._copy)
            caches = self._host.caches
        self._geometry = describe_cache(self._vllm_config, kv_cache_config, caches, tp_rank, pp_rank)
        if settings.tiers:
            self._mover = ChunkMover((pp_rank, tp_rank))
        if not settings.transfers:
            return WorkerCard(self._geometry, None, settings.anywhere, self._built)
        words = LeaseWords(new_incarnation(), LEASE_SLOTS)
        name = f"{self.engine_id}/{pp_rank}.{tp_rank}/{words.incarnation:x}"
        ours = _transfer_settings(settings)
        self._transfers = Transfers(name, self._geometry, words, ours)
        if self._vllm_config.kv_transfer_config.kv_role != "kv_producer":
            self._transfers.warm_up()
        fingerprint = ours.keys.fingerprint
        return WorkerCard(self._geometry, self._transfers.card, settings.anywhere, self._built, fingerprint)

    def _weights_change(self) -> None:
        """Believe nothing that was ordered so far, and let no peer believe what it reads here."""
        self._stale.on_weights_changed()
        self._meta.stale = self._stale.last
        self._void.update(self._orders)
        for key in self._orders:
            self._loads.give_up(key, CHANGED)
        if self._transfers is not None:
            self._transfers.words.void()

    def begin(self, meta: SchedulerMeta) -> None:
        """Take this step's orders, but for what is to be stored."""
        if meta.works:
            self._stale.on_step(meta.epoch)
        if self._transfers is not None:
            self._begin_transfers(self._transfers, meta)
        for begin in meta.chunks.begins:
            self._loads.begin(begin.key, begin.timeout_seconds)
            self._orders[begin.key] = begin
            if meta.epoch in self._stale:
                self._loads.give_up(begin.key, CHANGED)
        for key, why in meta.given_up.items():
            self._loads.give_up(key, why)
        if self._mover is not None:
            self._mover.load(meta.chunks)

    def _begin_transfers(self, transfers: Transfers, meta: SchedulerMeta) -> None:
        for peer, cards in meta.connects.items():
            transfers.connect(peer, cards)
        for peer in meta.disconnects:
            transfers.disconnect(peer)
        if meta.ended:
            transfers.words.end(meta.ended.values())
            self._sent.update(meta.ended)
        if meta.turns_ended:
            transfers.words.end(meta.turns_ended.values())
            self._meta.raised.update(dict.fromkeys(meta.turns_ended, 1))
        for order in meta.orders:
            self._loads.begin(order.key, order.timeout_seconds)
            self._orders[order.key] = order
            if self._stale.last is not None:
                self._loads.landed(order.key, CHANGED)
                continue
            transfers.submit(
                ReadOrder(
                    order.key,
                    order.peer,
                    order.span,
                    _arrays(order.src_tables),
                    _arrays(order.dst_tables),
                    order.lease,
                )
            )

    def save(self, meta: SchedulerMeta) -> None:
        """The step has computed what it was to: keep what is to be kept of it."""
        for tables, tokens in meta.saves:
            if self._host is not None:
                span = LoadSpan(0, tokens, tokens + 1)
                self._host.save(self._described().groups, self._needed(span, tables))
        if self._mover is not None and meta.chunks.stores:
            if meta.epoch in self._stale:
                self._mover.refuse(meta.chunks, CHANGED)
            else:
                self._mover.store(meta.chunks, after_forward())

    def results(self) -> KVConnectorTransferResults:
        """What has come to an end, for the engine; details go to the scheduler half with `take_meta`."""
        self._hear()
        if not (self._orders or self._sent):
            return KVConnectorTransferResults(set(), set(), set())
        settled = self._loads.settle()
        received, failed = set(), set()
        for key, outcome in settled.reported.items():
            order, failure = self._orders[key], outcome or (CHANGED if key in self._void else None)
            if failure is None and self._host is not None and isinstance(order, LoadOrder):
                self._host.load(self._described().groups, self._needed(order.span, order.dst_tables))
            whole = self._joined.reported(order.attempt, order.loads, failure)
            if whole is not None:
                received.add(order.request_id)
            if whole is False:
                failed.add(order.request_id)
            self._meta.reports[key] = _report(failure, key not in settled.released, self._results.get(key))
            self._meta.reported[key] = 1
        for key in settled.released:
            self._meta.released[key] = 1
            self._orders.pop(key, None)
            self._results.pop(key, None)
            self._void.discard(key)
        sent, self._sent = self._sent, set()
        return KVConnectorTransferResults(sent, received, failed)

    def _hear(self) -> None:
        """What the threads have done."""
        for result in self._transfers.results() if self._transfers is not None else ():
            self._results[result.key] = result
            self._loads.landed(result.key, result.failure)
        if self._mover is not None:
            for moved in self._mover.moved():
                self._meta.moved[moved.key] = MovedByAll.of(moved)
            for end in self._mover.ended():
                self._loads.landed(end.key, end.failure)

    def take_meta(self) -> WorkerMeta | None:
        """What the scheduler half is to know of this step."""
        if not self._meta:
            return None
        meta, self._meta = self._meta, WorkerMeta()
        return meta

    def shutdown(self) -> None:
        """End all threads."""
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        if self._mover is not None:
            self._mover.close()
            self._mover = None

    def _described(self) -> RankGeometry:
        assert self._geometry is not None, "start comes first"
        return self._geometry

    def _needed(self, span: LoadSpan, tables: BlockIds) -> list[Int64s]:
        groups = self._described().groups
        return [
            blocks_needed(group.kind, group.attention_span, group.block_tokens, span, table)
            for group, table in zip(groups, _arrays(tables), strict=True)
        ]


def _transfer_settings(config: ConnectorConfig) -> TransferSettings:
    return TransferSettings(
        None if config.strategy == "auto" else Strategy(config.strategy),
        load_costs(config.costs),
        config.staging_mib << 20,
        config.host,
        config.advertise_host or config.host,
        read_keys(config.secret_file),
        peers_allowed(config),
        config.lanes,
    )


def _arrays(tables: BlockIds) -> tuple[Int64s, ...]:
    return tuple(np.array(table, np.int64) for table in tables)


def _report(failure: str | None, late: bool, result: ReadResult | None) -> Report:
    if result is None or result.plan is None:
        return Report(failure, late, peer_lost=result is not None and result.peer_lost)
    plan = result.plan
    return Report(
        failure,
        late,
        plan.bytes_by_group,
        plan.tally.pages,
        plan.tally.descriptors,
        plan.tally.largest_run,
        plan.seconds,
        result.transfer_seconds,
        result.check_seconds,
        plan.strategy_by_group,
        result.peer_lost,
    )
