"""`FerryMultiConnector`: several of vLLM's KV connectors at once, and a choice between their offers.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "FerryMultiConnector",
        "kv_connector_module_path": "kvferry.engines.vllm.multi.connector", ...}'

It forwards vLLM's hooks to the children and merges their answers. All further logic is in `child_admission`
and `completions`.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from kvferry.common.errors import ConfigError
from kvferry.connector.bids import Bid, Speeds, StepTimes
from kvferry.connector.blocks import Headroom
from kvferry.connector.choosing import BidChooser
from kvferry.engines.vllm.compat.connectors import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
    as_current_config,
    class_of_transfer,
    register_connector,
)
from kvferry.engines.vllm.compat.process import share_logging
from kvferry.engines.vllm.compat.scheduler import Label, VLLMPrefixCache, prepare_scheduler
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.multi.child_admission import ChildAdmission
from kvferry.engines.vllm.multi.children import (
    agreed_count,
    agreed_layout,
    check,
    children_of,
    read_multi,
)
from kvferry.engines.vllm.multi.completions import BlockHolders, Completions, Ending
from kvferry.engines.vllm.multi.settings import parse_multi
from kvferry.engines.vllm.multi.stats import (
    MultiEvents,
    MultiHandshake,
    MultiMeta,
    MultiMetrics,
    MultiStats,
    MultiWorkerMeta,
)
from kvferry.engines.vllm.scheduler import cache_group, step_tokens
from kvferry.engines.vllm.transfer_config import wrong_name

logger = logging.getLogger(__name__)

NOT_FORWARDED = {
    "role": "an instance's own",
    "has_connector_metadata": "asks for what `bind_connector_metadata` was given, which is ours",
    "bind_gpu_block_pool": "children are given it by `bind_kv_cache_manager`, of which it is a part",
    "supports_sleep_mode": "children that do not support it are refused (`check`)",
}
"""Members of vLLM's base class that are not forwarded to the children. The value is the reason."""


def _forwarded(name: str, to: type = object) -> Any:
    """Return a hook that calls the hook `name` of every child of a class with its own arguments."""

    def hook(self: FerryMultiConnector, *arguments: Any, **named: Any) -> None:
        for child in self._connectors:
            if isinstance(child, to):
                getattr(child, name)(*arguments, **named)

    # vLLM lacks those that kvferry adds, and its releases lack some others.
    if (theirs := getattr(KVConnectorBase_V1, name, None)) is not None:
        hook.__signature__ = inspect.signature(theirs)  # type: ignore[attr-defined]
    return hook


class FerryMultiConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM connector that runs several connectors as children, and chooses which child loads a request."""

    _clock = staticmethod(time.monotonic)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Create the configured children.

        Raises:
            ConfigError: a setting is invalid, or the children cannot run together in one engine (`check`).
        """
        share_logging()
        settings, children = read_multi(vllm_config), children_of(vllm_config)
        check(children, vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._child_specs, self._names = children, tuple(child.name for child in children)
        self._connectors = [child.cls(child.config, role, kv_cache_config) for child in children]
        if role is KVConnectorRole.SCHEDULER:
            prepare_scheduler(vllm_config)
        self._speeds = Speeds()
        self._steps = StepTimes(self._speeds)
        weights = {child.name: child.load_weight for child in children}
        chooser = BidChooser(settings.source_policy, self._speeds, settings.patience_seconds, weights)
        self._admission = ChildAdmission(
            self._names,
            self._connectors,
            chooser,
            settings.attempts,
            self._clock,
            awaited=_awaited,
            deadlines={
                name: settings.load_timeout_seconds
                for name, child in self._children()
                if not isinstance(child, KVFerryConnector)  # which ends its loads by itself
            },
            workers=self.get_finished_count() or vllm_config.parallel_config.world_size,
        )
        self._block_holders = BlockHolders(self._names)
        self._completions = Completions()

    @property
    def sub_connectors(self) -> list[Any]:
        return list(self._connectors)

    def _children(self) -> Iterable[tuple[str, Any]]:
        return zip(self._names, self._connectors, strict=True)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return all(child.supports_divergent_local_hybrid_hits for child in self._connectors)

    @property
    def requires_kv_delivery(self) -> bool:
        return any(child.requires_kv_delivery for child in self._connectors)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return agreed_layout(children_of(vllm_config))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return any(
            class_of_transfer(child.transfer).requires_piecewise_for_cudagraph(
                child.transfer.get("kv_connector_extra_config", {})
            )
            for child in parse_multi(extra_config).children
        )

    def shutdown(self) -> None:
        # One child's error must not leave the threads of the others running.
        failed: list[Exception] = []
        for name, child in self._children():
            try:
                child.shutdown()
            except Exception as error:
                logger.exception("%s did not shut down", name)
                failed.append(error)
        if failed:
            raise failed[0]

    # In the scheduler's process.

    on_new_request = _forwarded("on_new_request")
    # Only kvferry's connectors learn of these (`tell_of_pauses`, `tell_of_sleep`).
    on_pause = _forwarded("on_pause", KVFerryConnector)
    on_sleep = _forwarded("on_sleep", KVFerryConnector)
    on_asleep = _forwarded("on_asleep", KVFerryConnector)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        groups = tuple(map(cache_group, self._kv_cache_config.kv_cache_groups))
        self._admission.headroom = Headroom.of(
            groups, step_tokens(self._vllm_config), kv_cache_manager.block_pool
        )
        self._admission.late.start(kv_cache_manager.block_pool)
        for child in self._connectors:
            child.bind_kv_cache_manager(kv_cache_manager)
        if self.supports_divergent_local_hybrid_hits:
            # Only if every child brings recurrent state may vLLM report prefixes without it.
            self._admission.prefix_cache = VLLMPrefixCache.of(kv_cache_manager)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        for child_index, child in enumerate(self._connectors):
            # A child without a handshake, or one that has not slept, is not called.
            if theirs := _of_child(metadata, child_index):
                child.set_xfer_handshake_metadata(theirs)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        for child_index, child in enumerate(self._connectors):
            if theirs := _of_child(metadata, child_index):
                child.set_xfer_handshake_metadata_pp_aware(theirs)

    def get_finished_count(self) -> int | None:
        counts = [child.get_finished_count() for child in self._connectors]
        return agreed_count(self._names, counts, self._vllm_config.parallel_config.world_size)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._admission.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        child_index = self._admission.chosen(request.request_id)
        if child_index is None:
            return ()
        return tuple(self._connectors[child_index].get_loaded_kv_cache_group_ids(request))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        loader = self._admission.allocated(request, blocks, num_external_tokens)
        for child_index, child in enumerate(self._connectors):
            if loader not in (None, child_index) and isinstance(child, KVFerryConnector):
                # A failed load is known only after the step, which would have stored KV computed from it.
                child.half.parts.distrust_all(request.request_id)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Label, int]:
        child_index = self._admission.chosen(request.request_id)
        found: dict[Label, int] = {}
        if child_index is not None:
            found = self._connectors[child_index].get_external_cache_hit_sources(request, num_external_tokens)
        return found

    def build_connector_meta(self, scheduler_output: Any) -> MultiMeta:
        self._steps.scheduled(scheduler_output.total_num_scheduled_tokens)
        self._admission.scheduled(scheduler_output.num_scheduled_tokens.keys())
        children = tuple(child.build_connector_meta(scheduler_output) for child in self._connectors)
        admission = self._admission
        return MultiMeta(
            children, admission.take_new(), self._block_holders.take_new(), admission.take_late()
        )

    def update_connector_output(self, connector_output: Any) -> None:
        meta, events = connector_output.kv_connector_worker_meta, connector_output.kv_cache_events
        try:
            for child_index, child in enumerate(self._connectors):
                # A child takes the output for its own, so each is shown its part of it.
                connector_output.kv_connector_worker_meta = meta and meta.children[child_index]
                connector_output.kv_cache_events = events and events.children[child_index]
                child.update_connector_output(connector_output)
        finally:
            connector_output.kv_connector_worker_meta = meta
            connector_output.kv_cache_events = events
        if meta is not None:
            self._admission.late.end(meta.ended)
        self._admission.take_results(
            connector_output.finished_recving or set(),
            connector_output.failed_recving,
            connector_output.invalid_block_ids,
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> Ending:
        return self._finish(request, lambda child: child.request_finished(request, block_ids))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Ending:
        def ended(child: Any) -> Any:
            if isinstance(child, SupportsHMA):
                return child.request_finished_all_groups(request, block_ids)
            return child.request_finished(request, block_ids[0])  # the hybrid manager is off: one group

        return self._finish(request, ended)

    def _finish(self, request: Any, ended: Callable[[Any], Ending]) -> Ending:
        endings = [ended(child) for child in self._connectors]
        self._admission.finished(request.request_id)
        return self._block_holders.join(request.request_id, endings)

    def register_finished_partial_tail(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        held = [
            child.register_finished_partial_tail(request, block_ids, partial_tail_offloads)
            for child in self._connectors
        ]
        return self._block_holders.record(request.request_id, held)

    def take_events(self) -> Iterable[Any]:
        for child in self._connectors:
            yield from child.take_events()

    def has_pending_block_frees(self) -> bool:
        return any(child.has_pending_block_frees() for child in self._connectors)

    def has_pending_push_work(self) -> bool:
        return any(child.has_pending_push_work() for child in self._connectors)

    @property
    def rest_seconds(self) -> float:
        return min((getattr(child, "rest_seconds", 0.0) for child in self._connectors), default=0.0)

    def reset_cache(self) -> bool | None:
        answers = [child.reset_cache() for child in self._connectors]
        return all(answer is not False for answer in answers)

    # On a worker.

    unregister_kv_caches = _forwarded("unregister_kv_caches")
    restore_kv_caches = _forwarded("restore_kv_caches")
    set_host_xfer_buffer_ops = _forwarded("set_host_xfer_buffer_ops")
    start_load_kv = _forwarded("start_load_kv")
    finish_forward = _forwarded("finish_forward")
    reset_capture_state = _forwarded("reset_capture_state")
    wait_for_layer_load = _forwarded("wait_for_layer_load")
    save_kv_layer = _forwarded("save_kv_layer")
    wait_for_save = _forwarded("wait_for_save")

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        found = [(name, child.get_mem_pool_context()) for name, child in self._children()]
        with_pool = [(name, context) for name, context in found if context is not None]
        if len(with_pool) > 1:
            raise ConfigError(
                f"{' and '.join(name for name, _ in with_pool)} each want a memory pool of their own for the "
                "KV cache, which is in one; configure it for one of them"
            )
        return with_pool[0][1] if with_pool else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for connector, child in zip(self._connectors, self._child_specs, strict=True):
            # A child reads its own settings in the current configuration.
            with as_current_config(child.config):
                connector.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> MultiHandshake | None:
        cards = tuple(child.get_handshake_metadata() for child in self._connectors)
        return None if all(card is None for card in cards) else MultiHandshake(cards)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        assert isinstance(connector_metadata, MultiMeta)
        super().bind_connector_metadata(connector_metadata)
        # Before the children run: they may report a load in the step that starts it.
        self._completions.expect(connector_metadata.loads, connector_metadata.holders)
        self._completions.give_up(connector_metadata.given_up)
        for child, meta in zip(self._connectors, connector_metadata.children, strict=True):
            child.bind_connector_metadata(meta)

    def clear_connector_metadata(self) -> None:
        for child in self._connectors:
            child.clear_connector_metadata()
        super().clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        for child, meta in zip(self._connectors, kv_connector_metadata.children, strict=True):
            child.handle_preemptions(meta)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._completions.join(
            [child.get_transfer_results(finished_req_ids) for child in self._connectors]
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        found = set[int]().union(*(child.get_block_ids_with_load_errors() for child in self._connectors))
        # A child's errors about blocks of late loads concern no request.
        return found - self._completions.late_blocks

    def get_kv_connector_kv_cache_events(self) -> MultiEvents | None:
        events = tuple(child.get_kv_connector_kv_cache_events() for child in self._connectors)
        return None if all(of is None for of in events) else MultiEvents(events)

    def build_connector_worker_meta(self) -> MultiWorkerMeta | None:
        metas = tuple(child.build_connector_worker_meta() for child in self._connectors)
        ended = self._completions.take_ended()
        return MultiWorkerMeta(metas, ended) if ended or any(meta is not None for meta in metas) else None

    # Stats of both, and their metrics.

    def get_kv_connector_stats(self) -> MultiStats | None:
        self._steps.done()
        children = {
            name: ((type(child).__module__, type(child).__qualname__), stats)
            for name, child in self._children()
            if (stats := child.get_kv_connector_stats()) is not None
        }
        counts = self._admission.counts if self._role is KVConnectorRole.SCHEDULER else None
        stats = MultiStats.of(children, counts)
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MultiStats:
        return MultiStats.read(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MultiMetrics:
        children = children_of(vllm_config)
        return MultiMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, children)


def _awaited(child: Any, request_id: str) -> Bid | None:
    """Return the offer that a child waits for; None if the child is not kvferry's, or does not say."""
    return child.half.admission.awaited(request_id) if isinstance(child, KVFerryConnector) else None


def _of_child(metadata: dict[Any, Any], child_index: int) -> dict[Any, Any]:
    """Return the handshakes of one child, by worker, out of `MultiHandshake` objects by worker."""
    found = {worker: handshake.children[child_index] for worker, handshake in metadata.items()}
    return {worker: handshake for worker, handshake in found.items() if handshake is not None}


def __getattr__(name: str) -> NoReturn:
    if not name[:1].isupper() and "ferry" not in name:  # no class: tools look for other names
        raise AttributeError(name)
    raise wrong_name(name, __name__)


register_connector(FerryMultiConnector.__name__, __name__)
