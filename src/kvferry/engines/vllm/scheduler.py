"""The scheduler half: what is decided in the engine's scheduler process."""

from __future__ import annotations

from typing import Any

from kvferry.engines.vllm import compat
from kvferry.engines.vllm.config import ConnectorConfig
from kvferry.engines.vllm.consumer import Consumer
from kvferry.engines.vllm.geometry import kind_of
from kvferry.engines.vllm.identity import facts_of
from kvferry.engines.vllm.meta import BlockIds, SchedulerMeta, WorkerCard, WorkerMeta
from kvferry.engines.vllm.producer import Producer
from kvferry.engines.vllm.stats import TransferStats
from kvferry.engines.vllm.transfer_log import TransferLog
from kvferry.errors import Incompatible
from kvferry.geometry import GroupKind, RankGeometry
from kvferry.planning.template import build_templates, kept_too_little
from kvferry.transport import security
from kvferry.transport.control_client import ControlClient
from kvferry.transport.control_server import Card, ControlServer
from kvferry.transport.lease import new_incarnation
from kvferry.transport.messages import RankCard


class SchedulerHalf:
    """Producer and consumer of one engine, and its two ends of the control channel."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._keys = security.read_keys(config.secret_file)
        security.check_host(config.host, self._keys, config.allow_insecure)
        incarnation = new_incarnation()
        self._kinds = tuple(kind_of(group) for group in kv_cache_config.kv_cache_groups)
        self._data_parallel_index = int(vllm_config.parallel_config.data_parallel_index)
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._facts = facts_of(vllm_config, compat.stored_rope(vllm_config.model_config), incarnation)
        self._producer = Producer(vllm_config, kv_cache_config, config, self._kinds, incarnation)
        self._pool: Any = None
        self._server: ControlServer | None = None
        self._client: ControlClient | None = None
        self._consumer: Consumer | None = None

    def bind_pool(self, pool: Any) -> None:
        """The engine's block pool."""
        self._pool = pool

    def start(self, cards: tuple[RankCard, ...]) -> None:
        """All workers are up: listen, and be ready to ask.

        Raises:
            ConfigError: the control channel cannot listen where it should.
        """
        config = self._config
        port = config.port + self._data_parallel_index if config.port else 0
        self._server = ControlServer(config.host, port, Card(self._facts, cards), self._keys)
        self._producer.port = self._server.port
        self._client = ControlClient(
            self._facts,
            lambda theirs: _check_all(theirs, cards),
            self._keys,
            config.handshake_seconds,
            config.lease_seconds / 4,
        )
        geometries = [card.geometry for card in cards]
        labels = [group.label for group in geometries[0].groups]
        log = TransferLog(config.transfer_log, labels, *full_attention_block(geometries))
        self._consumer = Consumer(
            self._kv_cache_config, config, self._kinds, self._client, len(cards), log
        )  # fmt: skip
        self._consumer.bind_pool(self._pool)

    @property
    def consumer(self) -> Consumer:
        """Set once the workers are up, which is before the first request."""
        assert self._consumer is not None
        return self._consumer

    def on_new_request(self, request: Any) -> None:
        """A request has come in."""
        self._producer.on_new_request(request)
        self.consumer.on_new_request(request)

    def finished(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; see `Producer.finished`."""
        self.consumer.finished(request.request_id)
        return self._producer.finished(request, block_ids)

    def build_meta(self, scheduler_output: Any) -> SchedulerMeta:
        """What the workers are to do in the coming step."""
        meta = SchedulerMeta(self._engine_id)
        if self._server is not None:
            self._producer.take_events(self._server.events, meta)
            self.consumer.hand_over(meta)
            if self._config.host_buffer:
                self._save_completed(scheduler_output, meta)
        return meta

    def take_output(self, output: Any) -> None:
        """What the workers did in the last step."""
        if isinstance(output.kv_connector_worker_meta, WorkerMeta):
            self.consumer.take_reports(output.kv_connector_worker_meta)
        if output.finished_sending:
            self._producer.sent(output.finished_sending)

    def take_stats(self) -> TransferStats | None:
        """What loads came to since the last call."""
        if self._consumer is None or self._consumer.stats.is_empty():
            return None
        taken, self._consumer.stats = self._consumer.stats, TransferStats()
        return taken

    def shutdown(self) -> None:
        """End both threads."""
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.close()
        self._client = self._server = None

    def _save_completed(self, scheduler_output: Any, meta: SchedulerMeta) -> None:
        """Prompts that the coming step completes go to the host buffer in it, before they are offered."""
        state = scheduler_output.kv_connector_block_state
        for request in self._producer.completed_by(scheduler_output.num_scheduled_tokens):
            tokens = request.num_prompt_tokens
            tables = self._producer.tables(state.resolve_block_ids(request.request_id), tokens)
            meta.saves.append((tuple(tables), tokens))


def sorted_cards(metadata: dict[tuple[int, int], Any]) -> tuple[RankCard, ...]:
    """Workers' cards by (pp_rank, tp_rank)."""
    cards = [metadata[place] for place in sorted(metadata)]
    assert all(isinstance(card, WorkerCard) for card in cards)
    return tuple(card.card for card in cards)


def _check_all(theirs: tuple[RankCard, ...], ours: tuple[RankCard, ...]) -> None:
    """Raise Incompatible unless each of our ranks can read what it needs."""
    peer = [card.geometry for card in theirs]
    for card in ours:
        build_templates(peer, card.geometry)
        if found := kept_too_little(peer, card.geometry):
            raise Incompatible(found)


def full_attention_block(ranks: list[RankGeometry]) -> tuple[int, float]:
    """(tokens, bytes) of a block of all layers, if all were of the widest attention that the model has."""
    per_layer = [
        (layer.page.content_bytes / layer.page.block_tokens, layer.page.block_tokens)
        for rank in ranks
        for group in rank.groups
        for layer in group.layers
        if group.kind is not GroupKind.STATE
    ]
    bytes_per_token, tokens = max(per_layer, default=(0.0, 1))
    return tokens, bytes_per_token * tokens * sum(
        len(group.layers) for rank in ranks for group in rank.groups
    )
