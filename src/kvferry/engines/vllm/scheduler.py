"""The connector's scheduler half in vLLM's scheduler process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.connector.adapters import Adapters
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.scheduler import SchedulerHalf
from kvferry.connector.stream import EventStream
from kvferry.engines.vllm.block_events import BlockEventPublisher
from kvferry.engines.vllm.compat.block_events import publishes_block_events
from kvferry.engines.vllm.compat.loras import hook_adapter_loads
from kvferry.engines.vllm.compat.prefix_cache import VLLMPrefixCache
from kvferry.engines.vllm.compat.spans import is_traced
from kvferry.engines.vllm.compat.wake import find_waker
from kvferry.engines.vllm.identifiers import Identifiers
from kvferry.engines.vllm.identity import built_by_all, facts_of, lora_settings, must_agree, namespace_of
from kvferry.engines.vllm.info import engine_info
from kvferry.engines.vllm.meta import SchedulerMeta, WorkerCard, WorkerMeta
from kvferry.engines.vllm.requests import VLLMRequests, VLLMStep
from kvferry.engines.vllm.stats import FerryStats
from kvferry.engines.vllm.tracing import tracing
from kvferry.errors import ConfigError
from kvferry.observe.explaining import RequestExplainer
from kvferry.observe.metrics_listener import MetricsListener
from kvferry.observe.recorder import RequestRecorder, recording_header, start_recording
from kvferry.observe.transfer_log import TransferLog

ONE_HANDSHAKE = (
    "vLLM's MultiConnector gives all children that of the first that has one; use FerryMultiConnector"
)

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}


class VLLMScheduler:
    """Adapter between vLLM's scheduler and kvferry's scheduler half, which does not depend on the engine.

    The scheduler half decides what is loaded and stored. This class passes vLLM's calls on to it, and turns
    the events of the scheduler half into metrics, traces and logs.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> None:
        """Create the scheduler half, and the listeners that turn its events into metrics, traces and logs.

        Args:
            vllm_config, kv_cache_config: vLLM's configurations of the engine and of its KV cache.
            config: the connector's settings.

        Raises:
            ConfigError: a setting is invalid, or kvferry cannot move one of the engine's KV cache groups.
        """
        self._config, self._vllm_config, self._kv_cache_config = config, vllm_config, kv_cache_config
        engine = engine_info(vllm_config, kv_cache_config)
        self._engine, self._engine_id = engine, engine.engine_id
        self._requests = VLLMRequests(vllm_config, kv_cache_config)
        self._identifiers = Identifiers()
        adapters = Adapters(lora_settings(vllm_config))
        hook_adapter_loads(adapters)
        self._fold = MetricsListener()
        events = EventStream(self._fold)
        self._block_events: BlockEventPublisher | None = None
        if publishes_block_events(vllm_config):
            self._block_events = BlockEventPublisher(kv_cache_config)
            events.subscribe(self._block_events)
        if is_traced(vllm_config):
            events.subscribe(tracing())
        self._explaining = RequestExplainer(
            events,
            config.explain_requests,
            engine_id=engine.engine_id,
            model=str(vllm_config.model_config.model),
            role=_ROLES.get(vllm_config.kv_transfer_config.kv_role, "both"),
            connector=config.name,
        )
        self._log: TransferLog | None = None
        self._recorder: RequestRecorder | None = None
        self.half = SchedulerHalf(engine, config, adapters, events)
        self._wake = find_waker()
        self._meta = SchedulerMeta(self._engine_id)
        self._pool: Any = None
        self._prefix_cache: VLLMPrefixCache | None = None

    def bind_manager(self, manager: Any) -> None:
        """Store the engine's block pool and prefix cache, which `start` passes to the scheduler half.

        Args:
            manager: vLLM's KVCacheManager.
        """
        self._pool, self._prefix_cache = manager.block_pool, VLLMPrefixCache.of(manager)

    @property
    def completes_prefixes(self) -> bool:
        """True if loads bring the recurrent state that vLLM lacks after a prefix of its own cache."""
        return self._prefix_cache is not None

    def start(self, cards: tuple[WorkerCard, ...]) -> None:
        """Start the scheduler half, after all workers of the engine have started.

        Args:
            cards: handshakes of all workers, sorted by (pp_rank, tp_rank).

        Raises:
            ConfigError: a worker's settings differ from this connector's, the transfer log cannot be opened,
                or the scheduler half cannot start (see `SchedulerHalf.start`).
        """
        if any(card.info.settings != self._config.without_host for card in cards):
            raise ConfigError(f"the workers' handshake is that of another KVFerryConnector: {ONE_HANDSHAKE}")
        agree = must_agree(
            self._vllm_config, self._kv_cache_config, built_by_all(card.built for card in cards)
        )
        workers = [card.info for card in cards]
        if self._config.transfers and self._config.transfer_log is not None:
            self._log = TransferLog(self._config.transfer_log, [worker.geometry for worker in workers])
            self.half.events.subscribe(self._log)
        self.half.start(
            workers,
            self._pool,
            facts=facts_of(self._vllm_config, agree, self.half.incarnation),
            namespace=lambda canonical: namespace_of(self._vllm_config, agree, canonical),
            prefix_cache=self._prefix_cache,
            wake=self._wake,
            describe_blocks=None if self._block_events is None else self._block_events.describe,
        )
        if self._config.record is not None:
            self._record(self._config.record, workers[0].geometry.labels)
        self._explaining.start()

    def wake(self, cards: tuple[WorkerCard, ...]) -> None:
        """Let peers read again, after the engine has slept.

        Args:
            cards: handshakes of all workers, sorted by (pp_rank, tp_rank).
        """
        self.half.wake([card.info for card in cards])

    def _record(self, path: str, labels: Sequence[str]) -> None:
        """Start to record requests in a file.

        Args:
            path: path of the file.
            labels: label of each KV cache group.
        """
        engine, model = self._engine, str(self._vllm_config.model_config.model)
        header = recording_header(engine, labels=labels, chunking=self.half.chunking, model=model)
        self._recorder = start_recording(path, header, self.half.adapters, engine.port_offset)
        if self._recorder is not None:
            self.half.events.subscribe(self._recorder)

    def on_new_request(self, request: Any) -> None:
        """Pass a new request of vLLM's scheduler on to the scheduler half.

        Also records the identifiers of the request's images and other items, to detect identifiers that are
        reused for other content.
        """
        self._identifiers.note(request)
        self.half.on_new_request(self._requests.wrap(request))

    def matched(self, request: Any, local_tokens: int) -> int | None:
        """Return the number of tokens to load for a request; None if vLLM must ask again later.

        Args:
            request: vLLM's request.
            local_tokens: number of prompt tokens that the engine's own prefix cache has. The loaded tokens
                follow these tokens.
        """
        wrapped = self._requests.wrap(request)
        tokens = self.half.admission.matched(wrapped, local_tokens)
        if tokens is not None:
            self.half.place_snapshots(wrapped, local_tokens + tokens)
        return tokens

    def allocated(self, request: Any, blocks: Any, load_tokens: int) -> None:
        """Start the load of a request's KV into its new blocks.

        Args:
            request: vLLM's request.
            blocks: vLLM's KVCacheBlocks of the request.
            load_tokens: number of tokens to load; 0 to load nothing.
        """
        self.half.admission.allocated(self._requests.wrap(request), blocks, load_tokens)

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request, and decide whether vLLM may free its blocks.

        Args:
            request: vLLM's request.
            block_ids: block ids of the request, for each KV cache group.

        Returns:
            True if vLLM must keep the request's blocks until kvferry releases them, and the
            ``kv_transfer_params`` of the response (None if the response has none).
        """
        wrapped = self._requests.wrap(request)
        if self._recorder is not None:
            self._recorder.finished(wrapped)
        return self.half.finished(wrapped, block_ids)

    def build_meta(self, scheduler_output: Any) -> SchedulerMeta:
        """Return the message that tells the workers which loads, stores and other work the coming step needs.

        Args:
            scheduler_output: vLLM's SchedulerOutput of the step.
        """
        orders = self.half.orders(VLLMStep(scheduler_output))
        if orders is not self._meta.orders:
            self._meta = SchedulerMeta(self._engine_id, orders)
        return self._meta  # in quiet steps, that of the step before

    def take_output(self, output: Any) -> None:
        """Pass the workers' reports about a step to the scheduler half.

        Args:
            output: vLLM's KVConnectorOutput of the step.
        """
        if isinstance(output.kv_connector_worker_meta, WorkerMeta):
            self.half.take_reports(output.kv_connector_worker_meta.reports)
        if output.finished_sending:
            self.half.sent(output.finished_sending)

    def take_stats(self) -> FerryStats | None:
        """Mark the end of a step, and return the metric counts since the last call; None if there are none.

        vLLM calls this exactly once at the end of each step, so this method also tells the scheduler half
        that the step is done.
        """
        self.half.step_done()
        return FerryStats.of(self._fold.take()) if self._fold.changed else None

    def take_block_events(self) -> list[Any]:
        """Return vLLM's KV events about blocks in tiers since the last call, and clear them.

        There are none unless vLLM publishes KV events.
        """
        return [] if self._block_events is None else self._block_events.take()

    def shutdown(self) -> None:
        """Stop the scheduler half and its threads, and close the logs."""
        self._explaining.close()
        self.half.shutdown()
        if self._log is not None:
            self._log.close()
        if self._recorder is not None:
            self._recorder.close()


def sorted_cards(metadata: dict[tuple[int, int], Any]) -> tuple[WorkerCard, ...]:
    """Return the workers' handshakes, sorted by (pp_rank, tp_rank).

    Args:
        metadata: handshake of each worker, by (pp_rank, tp_rank).

    Raises:
        ConfigError: a handshake is not a `WorkerCard`, because another connector class created it.
    """
    cards = [metadata[place] for place in sorted(metadata)]
    for card in cards:
        if not isinstance(card, WorkerCard):
            raise ConfigError(
                f"the workers' handshake is a {type(card).__name__}, not KVFerryConnector's: {ONE_HANDSHAKE}"
            )
    return tuple(cards)
