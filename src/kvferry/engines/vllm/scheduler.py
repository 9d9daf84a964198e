"""The connector's hooks in vLLM's scheduler process, in front of the connector's scheduler half."""

from __future__ import annotations

from collections import Counter
from functools import reduce
from typing import Any

from kvferry.common.errors import ConfigError
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.content import Adapters
from kvferry.connector.engine import CacheGroup, EngineFacts
from kvferry.connector.events import EventStream
from kvferry.connector.scheduler import SchedulerHalf
from kvferry.engines.vllm.built import Built
from kvferry.engines.vllm.compat.block_events import BlockEventPublisher, publishes_block_events
from kvferry.engines.vllm.compat.connectors import KVConnectorBase_V1, SupportsHMA
from kvferry.engines.vllm.compat.model import hook_adapter_loads, reads_ahead
from kvferry.engines.vllm.compat.process import find_waker, is_traced, tracing
from kvferry.engines.vllm.compat.requests import VLLMStep, parent_of, request_wrapper
from kvferry.engines.vllm.compat.scheduler import Label, VLLMPrefixCache, hit_source
from kvferry.engines.vllm.compat.specs import (
    attention_span_of,
    has_rings,
    reuses_prompts_only,
    scheduled_groups,
    snapshot_tokens,
    state_block_tokens,
    writes_before_hooks,
)
from kvferry.engines.vllm.geometry import kind_of_group
from kvferry.engines.vllm.identity import facts_of, lora_settings, must_agree, namespace_of
from kvferry.engines.vllm.items import Identifiers
from kvferry.engines.vllm.messages import SchedulerMeta, WorkerCard, WorkerMeta
from kvferry.observe.line_file import TransferLog
from kvferry.observe.metrics_listener import MetricsListener
from kvferry.observe.recorder import RequestRecorder, recording_header, start_recording
from kvferry.observe.trace_server import RequestExplainer
from kvferry.tiers.registry import medium_of


def engine_info(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    """Collect what the connector's scheduler half must know about the engine: groups, limits and features."""
    return EngineFacts(
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        groups=tuple(map(cache_group, scheduled_groups(vllm_config, kv_cache_config))),
        num_blocks=int(kv_cache_config.num_blocks),
        longest_request=int(vllm_config.model_config.max_model_len),
        steps_in_flight=int(vllm_config.max_concurrent_batches),
        tokens_in_flight=int(vllm_config.max_in_flight_tokens),
        step_tokens=step_tokens(vllm_config),
        draft_lookahead=reads_ahead(vllm_config),
        speculates=vllm_config.speculative_config is not None,
        reuses_prompts_only=reuses_prompts_only(kv_cache_config),
        has_rings=has_rings(kv_cache_config),
        writes_before_hooks=writes_before_hooks(vllm_config, kv_cache_config),
        # Data-parallel engines of a mixture of experts compute each step together.
        lockstep=vllm_config.parallel_config.data_parallel_size > 1,
        port_offset=int(vllm_config.parallel_config.data_parallel_index),
        parent_of=parent_of,
    )


def step_tokens(vllm_config: Any) -> int:
    """Return the maximum number of tokens that one step computes for one request, including draft tokens."""
    batched = vllm_config.scheduler_config.max_num_batched_tokens
    return int(batched + vllm_config.num_speculative_tokens)


def cache_group(group: Any) -> CacheGroup:
    """Describe one of the `scheduled_groups` for the connector's scheduler half."""
    spec = group.kv_cache_spec
    return CacheGroup(
        kind=kind_of_group(group),
        attention_span=attention_span_of(spec),
        block_tokens=int(spec.block_size),
        state_block_tokens=state_block_tokens(spec),
        snapshot_tokens=snapshot_tokens(spec),
    )


ONE_HANDSHAKE = (
    "vLLM's MultiConnector gives all children that of the first that has one; use FerryMultiConnector"
)

_NOT_STARTED = (
    "the scheduler got no handshake of the engine's workers, so kvferry has not started; if the connector is "
    "inside another one, such as vLLM's MultiConnector, use FerryMultiConnector instead"
)

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}


class SchedulerHooks(KVConnectorBase_V1, SupportsHMA):
    """Base class of `KVFerryConnector` with the hooks that vLLM calls on the scheduler's instance."""

    @property
    def half(self) -> SchedulerHalf:
        """The scheduler half, which decides what is loaded and stored. Workers' instances have none."""
        if self._half is None:
            raise ConfigError(_NOT_STARTED)
        return self._half

    def _open_scheduler(self, config: ConnectorConfig) -> None:
        """Create the scheduler half, and the listeners that turn its events into metrics, traces and logs."""
        vllm_config = self._vllm_config
        engine = engine_info(vllm_config, self._kv_cache_config)
        self._config, self._engine = config, engine
        self._wrap = request_wrapper(vllm_config, self._kv_cache_config)
        self._identifiers = Identifiers()
        adapters = Adapters(lora_settings(vllm_config))
        hook_adapter_loads(adapters)
        self._fold = MetricsListener()
        events = EventStream(self._fold)
        self._block_events: BlockEventPublisher | None = None
        if publishes_block_events(vllm_config):
            self._block_events = BlockEventPublisher(scheduled_groups(vllm_config, self._kv_cache_config))
            events.subscribe(self._block_events)
        if is_traced(vllm_config):
            events.subscribe(tracing())
        self._explaining = RequestExplainer(
            events,
            config.explain_requests,
            engine_id=engine.engine_id,
            model=str(vllm_config.model_config.model),
            # The role is read here, because `defer_frees` changes it later.
            role=_ROLES.get(vllm_config.kv_transfer_config.kv_role, "both"),
            connector=config.name,
        )
        self._log: TransferLog | None = None
        self._recorder: RequestRecorder | None = None
        self._events, self._adapters = events, adapters
        self._half: SchedulerHalf | None = None
        # The waker is looked for on the call stack, so only while vLLM creates the engine.
        self._wake = find_waker()
        self._meta = SchedulerMeta(engine.engine_id)
        self._pool: Any = None
        self._prefix_cache: VLLMPrefixCache | None = None

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._pool, self._prefix_cache = kv_cache_manager.block_pool, VLLMPrefixCache.of(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        # vLLM calls it once at the start, and again after each wake-up.
        if self._half is None:
            self._start(sorted_cards(metadata))
        elif metadata:
            self._half.wake([card.info for card in sorted_cards(metadata)])

    def _start(self, cards: tuple[WorkerCard, ...]) -> None:
        """Create the scheduler half, after all workers of the engine have started.

        Raises:
            ConfigError: a worker's settings differ, or the transfer log or the half cannot be opened.
        """
        config, vllm_config = self._config, self._vllm_config
        if any(card.settings != config.without_host for card in cards):
            raise ConfigError(f"the workers' handshake is that of another KVFerryConnector: {ONE_HANDSHAKE}")
        # Pipeline stages have built different parts of the model.
        built = reduce(Built.with_other, (card.built for card in cards), Built())
        agree = must_agree(vllm_config, self._kv_cache_config, built)
        workers = [card.info for card in cards]
        if config.transfers and config.transfer_log is not None:
            self._log = TransferLog(config.transfer_log, [worker.geometry for worker in workers])
            self._events.subscribe(self._log)
        self._half = SchedulerHalf(
            self._engine,
            config,
            workers,
            self._pool,
            adapters=self._adapters,
            events=self._events,
            facts=lambda incarnation: facts_of(vllm_config, agree, incarnation),
            namespace=lambda canonical: namespace_of(vllm_config, agree, canonical),
            prefix_cache=self._prefix_cache,
            wake=self._wake,
            describe_blocks=None if self._block_events is None else self._block_events.describe,
        )
        if config.record is not None:
            header = recording_header(
                self._engine,
                labels=workers[0].geometry.labels,
                chunking=self.half.chunking,
                model=str(vllm_config.model_config.model),
            )
            self._recorder = start_recording(config.record, header, self._adapters, self._engine.port_offset)
            if self._recorder is not None:
                self._events.subscribe(self._recorder)
        self._explaining.start()

    def on_new_request(self, request: Any) -> None:
        # Before the half looks at the request: names of its images depend on it.
        self._identifiers.note(request)
        self.half.on_new_request(self._wrap(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        wrapped = self._wrap(request)
        tokens = self.half.admission.matched(wrapped, num_computed_tokens)
        if tokens is not None:
            self.half.place_snapshots(wrapped, num_computed_tokens + tokens)
        return tokens, bool(tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.half.admission.allocated(self._wrap(request), blocks.blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Label, int]:
        if not num_external_tokens:
            return {}
        found = Counter[Label]()
        for place, tokens in self.half.admission.origins(request.request_id).items():
            found[hit_source(medium_of(place))] += tokens
        return found

    def has_pending_push_work(self) -> bool:
        return self.half.busy

    @property
    def rest_seconds(self) -> float:
        """Time in which a step without requests can do nothing, unless the engine gets input."""
        return 0.0 if self._half is None else self._half.rest_seconds

    def has_pending_block_frees(self) -> bool:
        return self.half.holds_blocks

    def on_pause(self, paused: bool) -> None:
        """Tell the scheduler half that the engine was paused or resumed (`tell_of_pauses`)."""
        self.half.on_pause(paused=paused)

    def on_sleep(self) -> None:
        """Tell the scheduler half that the engine is about to sleep (`tell_of_sleep`)."""
        self.half.on_sleep()

    def on_asleep(self, failed: bool) -> None:
        """Tell the scheduler half that the engine sleeps, or could not fall asleep (`tell_of_sleep`)."""
        self.half.on_asleep(failed=failed)

    def reset_cache(self) -> bool | None:
        self.half.reset()
        return True

    def build_connector_meta(self, scheduler_output: Any) -> SchedulerMeta:
        orders = self.half.orders(VLLMStep(scheduler_output))
        # Quiet steps have the same orders, and so the same message.
        if orders is not self._meta.orders:
            self._meta = SchedulerMeta(self._meta.engine_id, orders)
        return self._meta

    def update_connector_output(self, connector_output: Any) -> None:
        if isinstance(connector_output.kv_connector_worker_meta, WorkerMeta):
            self.half.take_reports(connector_output.kv_connector_worker_meta.reports)
        if connector_output.finished_sending:
            self.half.sent(connector_output.finished_sending)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        wrapped = self._wrap(request)
        # First, because the half's event of the end makes the recorder forget the request.
        if self._recorder is not None:
            self._events.release()
            self._recorder.finished(wrapped)
        return self.half.finished(wrapped, block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def take_events(self) -> list[Any]:
        return [] if self._block_events is None else self._block_events.take()

    def _close_scheduler(self) -> None:
        self._explaining.close()
        if self._half is not None:
            self._half.shutdown()
        if self._log is not None:
            self._log.close()
        if self._recorder is not None:
            self._recorder.close()


def sorted_cards(metadata: dict[tuple[int, int], Any]) -> tuple[WorkerCard, ...]:
    """Return the workers' handshakes by (pp_rank, tp_rank). Raise ConfigError for another connector's."""
    cards = [metadata[place] for place in sorted(metadata)]
    for card in cards:
        if not isinstance(card, WorkerCard):
            raise ConfigError(
                f"the workers' handshake is a {type(card).__name__}, not KVFerryConnector's: {ONE_HANDSHAKE}"
            )
    return tuple(cards)
