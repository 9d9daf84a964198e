"""The connector's worker half in vLLM's worker process."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from kvferry.connector.worker.half import WorkerHalf
from kvferry.connector.worker.stale import MOVED
from kvferry.engines.vllm import layout
from kvferry.engines.vllm.built import built_of
from kvferry.engines.vllm.cache_guard import CacheGuard
from kvferry.engines.vllm.compat.contract import KVConnectorTransferResults
from kvferry.engines.vllm.compat.memory import hook_sleep
from kvferry.engines.vllm.compat.process import tensor_and_pipeline_rank
from kvferry.engines.vllm.compat.weights import hook_weight_changes
from kvferry.engines.vllm.config import read_settings
from kvferry.engines.vllm.geometry import describe_cache
from kvferry.engines.vllm.host_buffer import CopyBlocks, HostBuffer
from kvferry.engines.vllm.meta import SchedulerMeta, WorkerCard, WorkerMeta
from kvferry.memory.device_stream import record_event

logger = logging.getLogger(__name__)


class VLLMWorker:
    """Adapter between a vLLM worker and kvferry's worker half, which does not depend on the engine.

    The worker half runs the loads, stores and transfers of the rank. This class describes the rank's KV cache
    to it, and passes vLLM's calls on to it.

    Attributes:
        engine_id: id of the engine.
        layout: memory layout of the cache, such as ``BHLNC``; ``unknown`` before `start`.
        half: the worker half.
        woken: True if the engine has slept and woken up since the last call of `start`.
    """

    def __init__(self, vllm_config: Any, caches: dict[str, Any]) -> None:
        """Store the engine's cache tensors, and patch the vLLM worker.

        The worker then tells the worker half when the weights change, when the KV cache loses its memory and
        when it has memory again.

        Args:
            vllm_config: the engine's configuration.
            caches: cache tensor of each layer, by layer name.

        Raises:
            ConfigError: the engine's model is not in this process.
        """
        self._vllm_config, self._caches = vllm_config, caches
        self._built = built_of(vllm_config)
        self.engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self.layout = "unknown"
        self.half, self.woken = WorkerHalf(), False
        self._copy: CopyBlocks | None = None
        self._guard: CacheGuard | None = None
        self._card: WorkerCard | None = None
        hook_weight_changes(vllm_config, self.half.on_weights_changed)
        hook_sleep(
            vllm_config,
            release=self.half.fall_asleep,
            restore=self._wake,
            lose_weights=self.half.on_weights_changed,
        )

    def set_copy(self, copy: CopyBlocks) -> None:
        """Store vLLM's operation for copying blocks between the device's KV cache and the host buffer."""
        self._copy = copy

    def start(self, kv_cache_config: Any) -> WorkerCard:
        """Describe and register the KV cache, start the transfers, and return the worker's handshake.

        A further call changes nothing. If the engine has slept since, the handshake has another card.

        Args:
            kv_cache_config: vLLM's configuration of the KV cache.

        Raises:
            ConfigError: kvferry cannot move this cache, the engine computes in other memory than it handed
                over, a setting is invalid, or NIXL is missing or cannot start.
        """
        self.woken = False
        if self._card is not None:
            return replace(self._card, info=self.half.info)
        caches, settings = self._caches, read_settings(self._vllm_config)
        tp_rank, pp_rank = tensor_and_pipeline_rank()
        self.layout = layout.read_back(kv_cache_config, caches)
        layout.check_forced(self._vllm_config, settings, self.layout)
        if (tp_rank, pp_rank) == (0, 0):
            logger.info("KV cache layout %s (setting: %s)", self.layout, settings.layout)
        mirror: HostBuffer | None = None
        if settings.host_buffer:
            mirror = HostBuffer(caches, kv_cache_config.num_blocks, self._copy)
            caches = mirror.caches
        geometry = describe_cache(self._vllm_config, kv_cache_config, caches, tp_rank, pp_rank)
        self._guard = CacheGuard(self._vllm_config, geometry, caches, self._caches)
        reads = self._vllm_config.kv_transfer_config.kv_role != "kv_producer"
        info = self.half.start(self.engine_id, geometry, settings, mirror=mirror, reads=reads)
        self._card = WorkerCard(info, self._built)
        return self._card

    def register_again(self, caches: dict[str, Any]) -> None:
        """Compare caches that vLLM hands over after `start` with the registered ones.

        If they are elsewhere, no load and no store uses the registered memory any more.

        Args:
            caches: cache tensor of each layer, by layer name.
        """
        if self._guard is not None:
            self._on_moved(self._guard.find_other(caches))

    def _wake(self) -> None:
        self.half.wake()
        self.woken = True

    def raise_words(self, meta: SchedulerMeta) -> None:
        """Tell peers which blocks the coming step may write. Call this before the step writes to the cache.

        Args:
            meta: message of the scheduler half for the step.
        """
        self.half.raise_words(meta.orders)

    def begin(self, meta: SchedulerMeta) -> None:
        """Start the work that a step's message asks for, except stores.

        vLLM calls this in every step, after the forward pass, and before anything of the step is reported. So
        this is where the guard looks whether the forward pass has used the registered memory.

        Args:
            meta: message of the scheduler half for the step.
        """
        if self._guard is not None:
            self._on_moved(self._guard.find_move(thorough=not meta.orders.quiet))
        self.half.begin(meta.orders)

    def save(self, meta: SchedulerMeta) -> None:
        """Start the stores that a step's message asks for. Call this after the step's forward pass is queued.

        Args:
            meta: message of the scheduler half for the step.
        """
        self.half.save(meta.orders, record_event)

    def results(self) -> KVConnectorTransferResults:
        """Return the ids of requests whose transfers have ended since the last call.

        The result has one set of ids for requests whose KV was sent, one for requests whose load has ended
        (received), and one for those whose load has failed.
        """
        ended = self.half.ended()
        return KVConnectorTransferResults(set(ended.sent), set(ended.received), set(ended.failed))

    def _on_moved(self, found: str) -> None:
        if found:
            self._guard = None
            logger.error(
                "%s: %s; it computes every prompt from now on, and uses no peers and no tiers: start it anew",
                MOVED, found,
            )  # fmt: skip
            self.half.on_cache_moved()

    def take_meta(self) -> WorkerMeta | None:
        """Return and clear the reports that have been recorded for the scheduler half.

        Return None if there are no reports.
        """
        reports = self.half.take_reports()
        return None if reports is None else WorkerMeta(reports)
