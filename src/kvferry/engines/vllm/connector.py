"""`KVFerryConnector`: kvferry as vLLM's KV connector.

    vllm serve MODEL --kv-transfer-config "$(kvferry config --role both)"

It adapts vLLM's hooks to the two halves of the connector, which decide and move.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar, NoReturn

from kvferry.common.errors import ConfigError
from kvferry.common.files import check_umask
from kvferry.engines.vllm import layout
from kvferry.engines.vllm.compat.connectors import (
    KVConnectorRole,
    KVConnectorTransferResults,
    current_config,
    register_connector,
)
from kvferry.engines.vllm.compat.process import check_fixed_memory, share_logging, sleep_between_polls
from kvferry.engines.vllm.compat.scheduler import prepare_scheduler
from kvferry.engines.vllm.config import keep_transfer, read_settings, unused_keys
from kvferry.engines.vllm.messages import FerryMetrics, FerryStats, SchedulerMeta, WorkerCard, WorkerMeta
from kvferry.engines.vllm.scheduler import ONE_HANDSHAKE, SchedulerHooks
from kvferry.engines.vllm.transfer_config import wrong_name
from kvferry.engines.vllm.worker import VLLMWorker
from kvferry.memory.device_stream import record_event

logger = logging.getLogger(__name__)


class KVFerryConnector(SchedulerHooks):
    """vLLM connector that moves KV between engines and KV tiers.

    vLLM creates one instance in the scheduler's process and one in each worker process. If a worker process
    runs two engines, they share the instance, which then has a worker half for each of them. The metadata of
    each step names the engine that runs the step.
    """

    _cache_configs: ClassVar[dict[str, Any]] = {}
    """KVCacheConfig of each engine in this process, by engine id. Each new instance overwrites the entry."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Check the settings and, in the scheduler's process, create the scheduler half of the connector.

        Raises:
            ConfigError: a setting is invalid, or kvferry cannot move the engine's KV cache.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        share_logging()
        sleep_between_polls(vllm_config)
        check_umask()
        config = read_settings(vllm_config)
        check_fixed_memory(vllm_config, transfers=config.transfers)
        self._workers: dict[str, VLLMWorker] = {}
        self._current: VLLMWorker | None = None
        self._arriving: VLLMWorker | None = None
        self._cache_configs[_engine_id(vllm_config)] = kv_cache_config
        # A scheduler's KVCacheConfig gives the spec of one layer for all layers of a group, although they may
        # have different numbers of heads. A worker's has the spec of every layer. The second engine of a
        # process has no worker instance of its own, so its worker half uses the scheduler's.
        self._own_cache_config = kv_cache_config if role is KVConnectorRole.WORKER else None
        if role is KVConnectorRole.SCHEDULER:
            if unused := unused_keys(vllm_config.kv_transfer_config.kv_port):
                logger.warning("kvferry: %s", unused)
            self._open_scheduler(config)
            # Before the role changes (`defer_frees`), from which the setting `transfer` may follow.
            keep_transfer(vllm_config, config)
            prepare_scheduler(vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        # If True, vLLM recomputes a request that is preempted before its KV was handed over. Tiers do not
        # need that, because KV that is missing in a tier can be computed again.
        return bool(read_settings(self._vllm_config).transfers and super().requires_kv_delivery)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        # If True, vLLM may share attention blocks whose recurrent state it lacks, because a load brings it.
        # If nothing is loaded, vLLM falls back to the prefix that all KV cache groups have.
        return self._role is KVConnectorRole.SCHEDULER and self._prefix_cache is not None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return layout.requested_layout(vllm_config, read_settings(vllm_config))

    @property
    def worker(self) -> VLLMWorker:
        """The worker half of the engine that runs the current step. Exists only in a worker."""
        assert self._current is not None
        return self._current

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        arriving = current_config() or self._vllm_config
        if _engine_id(arriving) == _engine_id(self._vllm_config):
            # As the child of another connector, only this instance's own copy has its settings.
            arriving = self._vllm_config
        if (running := self._workers.get(_engine_id(arriving))) is not None:
            running.register_again(kv_caches)
            self._arriving = running
        else:
            self._arriving = VLLMWorker(arriving, kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        assert self._arriving is not None
        self._arriving.copy = copy_operation

    def get_handshake_metadata(self) -> WorkerCard | None:
        """Start the worker half for the KV cache that vLLM registered last, and return its handshake.

        vLLM calls this on each worker after it has created the engine's scheduler, and again when the engine
        has woken up. Return None if the engine has not slept since the last call.
        """
        woken = next((worker for worker in self._workers.values() if worker.woken), None)
        worker, self._arriving = self._arriving or woken, None
        if worker is None:
            return None
        # This instance's own config is that of its first engine.
        own, self._own_cache_config = self._own_cache_config, None
        self._current = self._workers[worker.engine_id] = worker
        return worker.start(own or self._cache_configs[worker.engine_id])

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._current = self._worker_of(connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: SchedulerMeta) -> None:
        """Raise the lease words of blocks that the coming step may write.

        vLLM calls this hook in every step, before the forward pass. Its first model runner calls it before it
        zeroes or copies blocks, the second one after that (`EngineFacts.writes_before_hooks`). Both call
        `start_load_kv` after the forward pass.
        """
        # vLLM binds the step's metadata later than this.
        if kv_connector_metadata.orders.raised:
            self._worker_of(kv_connector_metadata).half.raise_words(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.begin(self._step_meta())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous, and vLLM schedules a request only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: peers and tiers read KV only after the step that computes it."""

    def wait_for_save(self) -> None:
        meta = self._step_meta()
        if not meta.orders.quiet:
            self.worker.half.save(meta.orders, record_event)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended = self.worker.half.ended()
        return KVConnectorTransferResults(set(ended.sent), set(ended.received), set(ended.failed))

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        reports = self.worker.half.take_reports()
        return None if reports is None else WorkerMeta(reports)

    def get_kv_connector_stats(self) -> FerryStats | None:
        if self._role is not KVConnectorRole.SCHEDULER:
            return None
        # vLLM calls this exactly once at the end of each step.
        self.half.step_done()
        return FerryStats(self._fold.take().plain()) if self._fold.changed else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        return FerryStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FerryMetrics:
        return FerryMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._role is KVConnectorRole.SCHEDULER:
            self._close_scheduler()
        for worker in self._workers.values():
            worker.half.shutdown()

    def _worker_of(self, meta: SchedulerMeta) -> VLLMWorker:
        if meta.engine_id not in self._workers:
            raise ConfigError(f"a KVFerryConnector was not asked for its handshake: {ONE_HANDSHAKE}")
        return self._workers[meta.engine_id]

    def _step_meta(self) -> SchedulerMeta:
        meta = self._get_connector_metadata()
        assert isinstance(meta, SchedulerMeta)
        return meta


def _engine_id(vllm_config: Any) -> str:
    return str(vllm_config.kv_transfer_config.engine_id)


def __getattr__(name: str) -> NoReturn:
    if not name[:1].isupper() and "ferry" not in name:  # no class: tools look for other names
        raise AttributeError(name)
    raise wrong_name(name, __name__)


# vLLM's MultiConnector finds the class of a child's stats by its name alone.
register_connector(KVFerryConnector.__name__, __name__)
