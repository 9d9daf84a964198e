"""`KVFerryConnector`: kvferry as vLLM's KV connector.

    vllm serve MODEL --kv-transfer-config "$(kvferry config --role both)"

This class only forwards vLLM's hooks to the two halves of the connector, in `scheduler` and `worker`.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, ClassVar, NoReturn

from kvferry.engines.vllm import layout
from kvferry.engines.vllm.compat.arrivals import guard_arrivals
from kvferry.engines.vllm.compat.connectors import current_config, register_connector
from kvferry.engines.vllm.compat.contract import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from kvferry.engines.vllm.compat.frees import defer_frees
from kvferry.engines.vllm.compat.hit_sources import Label, hit_source
from kvferry.engines.vllm.compat.pauses import tell_of_pauses
from kvferry.engines.vllm.compat.process import share_logging, sleep_between_polls
from kvferry.engines.vllm.compat.sleep import tell_of_sleep
from kvferry.engines.vllm.config import keep_transfer, read_settings, unused_keys
from kvferry.engines.vllm.fixed_memory import check_fixed_memory
from kvferry.engines.vllm.meta import SchedulerMeta, WorkerCard, WorkerMeta
from kvferry.engines.vllm.scheduler import ONE_HANDSHAKE, VLLMScheduler, sorted_cards
from kvferry.engines.vllm.stats import FerryMetrics, FerryStats
from kvferry.engines.vllm.transfer_config import wrong_name
from kvferry.engines.vllm.worker import VLLMWorker
from kvferry.errors import ConfigError
from kvferry.private_file import check_umask
from kvferry.tiers.registry import medium_of

logger = logging.getLogger(__name__)


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM connector that moves KV between engines and KV tiers.

    vLLM creates one instance in the scheduler's process and one in each worker process. The instance in the
    scheduler has a scheduler half, which decides what is moved. The instance in a worker process has a worker
    half, which moves it. If a worker process runs two engines, they share the instance, which then has a
    worker half for each of them. The metadata of each step names the engine that runs the step.
    """

    _cache_configs: ClassVar[dict[str, Any]] = {}
    """KVCacheConfig of each engine in this process, by engine id. Each new instance overwrites the entry.

    The KVCacheConfig of a scheduler gives the spec of one layer for all layers of a group, although the
    layers may have different numbers of heads. That of a worker has the spec of every layer. The second
    engine of a process has no worker instance of its own, so its worker half uses the scheduler's
    KVCacheConfig.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Validate the settings and, in the scheduler's process, create the scheduler half of the connector.

        Worker halves are created later, when vLLM registers a KV cache (`register_kv_caches`).

        Args:
            vllm_config, role, kv_cache_config: arguments that vLLM gives to a connector.

        Raises:
            ConfigError: a setting is invalid, or kvferry cannot move the engine's KV cache. The message says
                why and what to do.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        share_logging()
        sleep_between_polls(vllm_config)
        check_umask()
        config = read_settings(vllm_config)
        check_fixed_memory(vllm_config, transfers=config.transfers)
        self._scheduler: VLLMScheduler | None = None
        self._workers: dict[str, VLLMWorker] = {}
        self._started = False
        self._current: VLLMWorker | None = None
        self._arriving: VLLMWorker | None = None
        self._cache_configs[_engine_id(vllm_config)] = kv_cache_config
        self._own_cache_config = kv_cache_config if role is KVConnectorRole.WORKER else None
        if role is KVConnectorRole.SCHEDULER:
            if unused := unused_keys(vllm_config.kv_transfer_config.kv_port):
                logger.warning("kvferry: %s", unused)
            self._scheduler = VLLMScheduler(vllm_config, kv_cache_config, config)
            keep_transfer(vllm_config, config)
            defer_frees(vllm_config)
            guard_arrivals()
            tell_of_pauses()
            tell_of_sleep()

    @property
    def requires_kv_delivery(self) -> bool:
        """True if this engine hands KV over to other engines; False, for example, if it only has tiers.

        If True, vLLM recomputes a request that is preempted before its KV was handed over. This is not
        needed for tiers, because KV that is missing in a tier can be computed again.
        """
        return bool(read_settings(self._vllm_config).transfers and super().requires_kv_delivery)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """True if vLLM may share attention blocks whose recurrent state it lacks, because a load brings it.

        If nothing is loaded, vLLM falls back to the prefix that all KV cache groups have.
        """
        return self._scheduler is not None and self._scheduler.completes_prefixes

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return layout.requested_layout(vllm_config, read_settings(vllm_config))

    # -- scheduler half -----------------------------------------------------------------------------------

    @property
    def scheduler(self) -> VLLMScheduler:
        """Scheduler half of the connector, which exists only in the scheduler's process."""
        assert self._scheduler is not None
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.bind_manager(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        if not self._started:
            self.scheduler.start(sorted_cards(metadata))
            self._started = True
        elif metadata:
            self.scheduler.wake(sorted_cards(metadata))

    def on_new_request(self, request: Any) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self.scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Label, int]:
        if not num_external_tokens:
            return {}
        found = Counter[Label]()
        for place, tokens in self.scheduler.half.admission.origins(request.request_id).items():
            found[hit_source(medium_of(place))] += tokens
        return found

    def has_pending_push_work(self) -> bool:
        return self.scheduler.half.busy

    def has_pending_block_frees(self) -> bool:
        return self.scheduler.half.holds_blocks

    def on_pause(self, paused: bool) -> None:
        """Tell the scheduler half that the engine was paused or resumed (`tell_of_pauses`)."""
        self.scheduler.half.on_pause(paused=paused)

    def on_sleep(self) -> None:
        """Tell the scheduler half that the engine is about to sleep (`tell_of_sleep`)."""
        self.scheduler.half.on_sleep()

    def on_asleep(self, failed: bool) -> None:
        """Tell the scheduler half that the engine sleeps, or could not fall asleep (`tell_of_sleep`)."""
        self.scheduler.half.on_asleep(failed=failed)

    def reset_cache(self) -> bool | None:
        self.scheduler.half.reset()
        return True

    def build_connector_meta(self, scheduler_output: Any) -> SchedulerMeta:
        return self.scheduler.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.kv_connector_worker_meta is not None or connector_output.finished_sending:
            self.scheduler.take_output(connector_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, (block_ids,))

    def take_events(self) -> list[Any]:
        return self.scheduler.take_block_events()

    # -- worker half --------------------------------------------------------------------------------------

    @property
    def worker(self) -> VLLMWorker:
        """Worker half of the connector for the engine that runs the current step. Exists only in a worker."""
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
        self._arriving.set_copy(copy_operation)

    def get_handshake_metadata(self) -> WorkerCard | None:
        """Start the worker half for the KV cache that vLLM registered last, and return its handshake.

        The handshake describes this rank to the scheduler half: its memory layout, address and settings. vLLM
        calls this method on each worker after it has created the engine's scheduler, and passes all
        handshakes to the scheduler half. It does so again when the engine has woken up. Return None if the
        engine has not slept since the last call.
        """
        woken = next((worker for worker in self._workers.values() if worker.woken), None)
        worker, self._arriving = self._arriving or woken, None
        if worker is None:
            return None
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
        if kv_connector_metadata.orders.raised:
            self._worker_of(kv_connector_metadata).raise_words(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.begin(self._step_meta())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous, and vLLM schedules a request only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: peers and tiers read KV only after the step that computes it."""

    def wait_for_save(self) -> None:
        meta = self._step_meta()
        if not meta.orders.quiet:
            self.worker.save(meta)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker.results()

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        return self.worker.take_meta()

    # -- both ---------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> FerryStats | None:
        return None if self._scheduler is None else self._scheduler.take_stats()

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
        if self._scheduler is not None:
            self._scheduler.shutdown()
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
    """Refuse a wrong ``kv_connector`` in words: vLLM looks the class up in this module."""
    if not name[:1].isupper() and "ferry" not in name:  # no class: tools look for other names
        raise AttributeError(name)
    raise wrong_name(name, __name__)


register_connector(KVFerryConnector.__name__, __name__)
