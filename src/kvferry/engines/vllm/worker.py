"""The connector's worker half for one engine, and what it needs of vLLM's worker."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from kvferry.connector.messages import MOVED
from kvferry.connector.worker import WorkerHalf
from kvferry.engines.vllm import layout
from kvferry.engines.vllm.built import built_of
from kvferry.engines.vllm.cache_guard import CacheGuard, CopyBlocks, HostBuffer
from kvferry.engines.vllm.compat.model import hook_weight_changes
from kvferry.engines.vllm.compat.process import WorkerRanks, hook_sleep, worker_ranks
from kvferry.engines.vllm.config import read_settings
from kvferry.engines.vllm.geometry import describe_cache
from kvferry.engines.vllm.messages import SchedulerMeta, WorkerCard

logger = logging.getLogger(__name__)


class VLLMWorker:
    """The worker half of one engine, with the KV cache that the engine has registered.

    Attributes:
        layout: memory layout of the cache, such as ``BHLNC``; ``unknown`` before `start`.
        copy: vLLM's operation that copies blocks between the cache and the host buffer.
        woken: True if the engine has slept and woken up since the last call of `start`.
    """

    def __init__(self, vllm_config: Any, caches: dict[str, Any]) -> None:
        """Store the cache tensors by layer name, and patch vLLM's worker to tell of sleep and new weights."""
        self._vllm_config, self._caches = vllm_config, caches
        self._built = built_of(vllm_config)
        self.engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self.layout = "unknown"
        self.half, self.woken = WorkerHalf(), False
        self.copy: CopyBlocks | None = None
        self._guard: CacheGuard | None = None
        self._card: WorkerCard | None = None
        # Now, because vLLM's worker may be impossible to find after the warm-up (`worker_of`).
        hook_weight_changes(vllm_config, self.half.on_weights_changed)
        hook_sleep(
            vllm_config,
            release=self.half.fall_asleep,
            restore=self._wake,
            lose_weights=self.half.on_weights_changed,
        )

    def start(self, kv_cache_config: Any) -> WorkerCard:
        """Describe and register the KV cache, start the transfers, and return the worker's handshake.

        A further call changes nothing. If the engine has slept since, the handshake has another card.

        Raises:
            ConfigError: kvferry cannot move this cache, a setting is invalid, or NIXL cannot start.
        """
        self.woken = False
        if self._card is not None:
            return replace(self._card, info=self.half.info)
        caches, settings = self._caches, read_settings(self._vllm_config)
        ranks = worker_ranks()
        self.layout = layout.read_back(kv_cache_config, caches)
        layout.check_forced(self._vllm_config, settings, self.layout)
        # One rank logs for all of them.
        if ranks == WorkerRanks():
            logger.info("KV cache layout %s (setting: %s)", self.layout, settings.layout)
        mirror: HostBuffer | None = None
        if settings.host_buffer:
            mirror = HostBuffer(caches, kv_cache_config.num_blocks, self.copy)
            caches = mirror.caches
        geometry = describe_cache(self._vllm_config, kv_cache_config, caches, ranks)
        # Before anything is registered: transfers into other memory would silently give wrong answers.
        self._guard = CacheGuard(self._vllm_config, geometry, caches, self._caches)
        reads = self._vllm_config.kv_transfer_config.kv_role != "kv_producer"
        info = self.half.start(self.engine_id, geometry, settings, mirror=mirror, reads=reads)
        self._card = WorkerCard(info, settings.without_host, self._built)
        return self._card

    def register_again(self, caches: dict[str, Any]) -> None:
        """Compare caches that vLLM hands over after `start` with the registered ones."""
        if self._guard is not None:
            self._on_moved(self._guard.find_other(caches))

    def begin(self, meta: SchedulerMeta) -> None:
        """Begin the loads and transfers of a step, after its forward pass (`WorkerHalf.begin`)."""
        # Here, because the forward pass has run, and nothing of the step has been reported yet.
        if self._guard is not None:
            self._on_moved(self._guard.find_move(thorough=not meta.orders.quiet))
        self.half.begin(meta.orders)

    def _wake(self) -> None:
        self.half.wake()
        self.woken = True

    def _on_moved(self, found: str) -> None:
        if found:
            # The cache is never used again, so one line in the log is enough.
            self._guard = None
            logger.error(
                "%s: %s; it computes every prompt from now on, and uses no peers and no tiers: start it anew",
                MOVED, found,
            )  # fmt: skip
            self.half.on_cache_moved()
