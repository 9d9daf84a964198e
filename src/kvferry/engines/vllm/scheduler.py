"""The connector's half in the engine's scheduler process: it makes all decisions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from kvferry.cache.pins import Pins
from kvferry.cache.policies import Choice, Cost, First, Policy, Weight
from kvferry.cache.speeds import Speeds
from kvferry.engines.vllm.access import check_rank_keys, peers_allowed, scheduler_keys
from kvferry.engines.vllm.adapters import Adapters
from kvferry.engines.vllm.admission import Admission
from kvferry.engines.vllm.compat.loras import hook_adapter_loads
from kvferry.engines.vllm.compat.specs import names_prompts_only
from kvferry.engines.vllm.config import ConnectorConfig
from kvferry.engines.vllm.explaining import Explaining
from kvferry.engines.vllm.geometry import kind_of_group
from kvferry.engines.vllm.headroom import Headroom
from kvferry.engines.vllm.identifiers import Identifiers
from kvferry.engines.vllm.identity import built_by_all, facts_of, lora_settings, must_agree
from kvferry.engines.vllm.meta import BlockIds, SchedulerMeta, WorkerCard, WorkerMeta
from kvferry.engines.vllm.part_blocks import PartBlocks
from kvferry.engines.vllm.peer_source import PeerSource
from kvferry.engines.vllm.producer import Producer
from kvferry.engines.vllm.refusals import Refusals
from kvferry.engines.vllm.source import Source
from kvferry.engines.vllm.stale import CHANGED
from kvferry.engines.vllm.stats import FerryStats
from kvferry.engines.vllm.step_times import StepTimes
from kvferry.engines.vllm.tier_config import read_tiers
from kvferry.engines.vllm.tiering import Tiering
from kvferry.engines.vllm.tracing import tracing
from kvferry.engines.vllm.transfer_log import TransferLog
from kvferry.engines.vllm.turn_finder import TurnFinder
from kvferry.engines.vllm.turn_names import TurnNames
from kvferry.errors import ConfigError, Incompatible
from kvferry.geometry import GroupKind, RankGeometry
from kvferry.observe.metrics_listener import MetricsListener
from kvferry.observe.stream import EventStream
from kvferry.planning.template import absent_layer_names, window_mismatches
from kvferry.tiers.names import PEER
from kvferry.transport.control_client import ControlClient
from kvferry.transport.control_server import ControlServer, ProducerCard
from kvferry.transport.lease import new_incarnation
from kvferry.transport.messages import Fact, RankCard
from kvferry.transport.security import Keys

logger = logging.getLogger(__name__)

ONE_HANDSHAKE = (
    "vLLM's MultiConnector gives all children that of the first that has one; use FerryMultiConnector"
)


RESET = "tiers are not used before POST /reset_prefix_cache?reset_external=true"


class SchedulerHalf:
    """Producer, admission and tiers of one engine, and its two ends of the control channel.

    Attributes:
        events: receives events about requests.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> None:
        self._config, self._tiers = config, read_tiers(config.tiers)
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._keys = scheduler_keys(config)
        self._kinds = tuple(kind_of_group(group) for group in kv_cache_config.kv_cache_groups)
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._incarnation = new_incarnation()
        self._fold = MetricsListener()
        self.events = EventStream(self._fold)
        if (spans := tracing(vllm_config)) is not None:
            self.events.subscribe(spans)
        self._explaining = Explaining(vllm_config, config.explain_requests, self.events, config.name)
        self._adapters = Adapters(lora_settings(vllm_config))
        self._identifiers = Identifiers()
        hook_adapter_loads(self._adapters)
        prompts_only = names_prompts_only(kv_cache_config)
        self._turn_names = TurnNames(self._adapters, prompts_only=prompts_only)
        self._producer = Producer(
            vllm_config,
            kv_cache_config,
            config,
            self._kinds,
            self._incarnation,
            self.events,
            self._turn_names,
            self._adapters,
        )
        self._refusals = Refusals(self.events)
        self._speeds = Speeds()
        self._steps = StepTimes(self._speeds)
        self._pool: Any = None
        self._server: ControlServer | None = None
        self._client: ControlClient | None = None
        self._peers: PeerSource | None = None
        self._tiering: Tiering | None = None
        self._parts: PartBlocks | None = None
        self._admission: Admission | None = None
        self._epoch, self._changed = 0, False

    def bind_pool(self, pool: Any) -> None:
        """Set the engine's block pool."""
        self._pool = pool

    def start(self, cards: tuple[WorkerCard, ...]) -> None:
        """Start the control channel and open the tiers; called when all workers are up.

        Raises:
            ConfigError: the control channel cannot listen at its address, the tiers could keep nothing, a
                worker has another key, or the workers belong to another connector.
        """
        if any(card.settings != self._config.anywhere for card in cards):
            raise ConfigError(f"the workers' handshake is that of another KVFerryConnector: {ONE_HANDSHAKE}")
        agree = must_agree(
            self._vllm_config, self._kv_cache_config, built_by_all(card.built for card in cards)
        )
        pins: Pins[Any] = Pins(len(cards))
        self._parts = PartBlocks(cards[0].geometry.groups, self._pool, self._config.whole_blocks)
        sources: list[Source] = []
        ranks = [card.card for card in cards if card.card is not None]
        if ranks and self._keys is not None:
            check_rank_keys(self._keys, cards)
            sources.append(self._meet_peers(tuple(ranks), agree, pins, self._keys))
        if self._tiers is not None:
            self._tiering = Tiering(
                self._tiers,
                self._config,
                self._vllm_config,
                self._kv_cache_config,
                agree,
                self._adapters,
                [card.geometry for card in cards],
                self._parts,
                self._pool,
                self._refusals,
                self.events,
            )
            sources.append(self._tiering.source)
        self._admission = Admission(
            self._kv_cache_config,
            self._kinds,
            pins,
            self._parts,
            Headroom.of(self._vllm_config, self._kv_cache_config, self._pool),
            self._pool,
            len(cards),
            self._config.attempts,
            sources,
            Choice(self._policy(), self._speeds, self._config.patience_seconds),
            self.events,
        )
        self._explaining.start()

    def _policy(self) -> Policy:
        """Make the policy that chooses between sources."""
        if self._config.policy == "first":
            return First()
        if self._config.policy == "cost":
            return Cost(self._speeds)
        tiers = self._tiering.weights if self._tiering is not None else {}
        return Weight({PEER: self._config.load_weight, **tiers})

    def _meet_peers(
        self, ranks: tuple[RankCard, ...], agree: Mapping[str, Fact], pins: Pins[Any], keys: Keys
    ) -> PeerSource:
        """Start both ends of the control channel; return the source of peers' KV."""
        config, peers = self._config, peers_allowed(self._config)
        facts = facts_of(self._vllm_config, agree, self._incarnation)
        index = int(self._vllm_config.parallel_config.data_parallel_index)
        port = config.port + index if config.port else 0
        self._server = ControlServer(config.host, port, ProducerCard(facts, ranks), keys, peers)
        self._producer.start(self._server, self._pool, len(ranks))
        server = self._server
        self._client = ControlClient(
            structs.replace(facts, keeps_turns=self._producer.keeps_turns),
            lambda theirs: _check_all(theirs, ranks),
            keys,
            peers,
            config.handshake_seconds,
            config.lease_seconds / 4,
        )
        geometries = [card.geometry for card in ranks]
        labels = [group.label for group in geometries[0].groups]
        log = TransferLog(config.transfer_log, labels, *full_attention_block(geometries))
        most_held = int(config.late_blocks * self._kv_cache_config.num_blocks)
        self._peers = PeerSource(
            self._client,
            geometries,
            pins,
            log,
            self._refusals,
            config.load_timeout_seconds,
            most_held,
            TurnFinder(self._client, lambda: server.keepers, self._turn_names),
            self._adapters,
        )
        return self._peers

    @property
    def admission(self) -> Admission:
        """Chooses sources for requests; set when the workers are up, before the first request."""
        assert self._admission is not None
        return self._admission

    @property
    def parts(self) -> PartBlocks:
        """Blocks that loads fill in part; set with `admission`."""
        assert self._parts is not None
        return self._parts

    @property
    def busy(self) -> bool:
        """Whether the engine must keep stepping even without requests."""
        return self._producer.busy or (self._tiering is not None and self._tiering.busy)

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks will become free without preempting a request."""
        return self._producer.holds_blocks or (self._tiering is not None and self._tiering.holds_blocks)

    def on_new_request(self, request: Any) -> None:
        """Handle a new request."""
        self._identifiers.note(request)
        if self._config.transfers:
            self._producer.on_new_request(request)
        self.admission.on_new_request(request)
        if self._tiering is not None:
            self._tiering.on_new_request(request)

    def finished(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request; see `Producer.finished`."""
        self.admission.finished(request.request_id)
        whole = self.parts.without(request.request_id, block_ids)
        self.parts.forget(request.request_id)
        if self._tiering is not None:
            self._tiering.finished(request, whole)
        return self._producer.finished(request, whole) if self._config.transfers else (False, None)

    def build_meta(self, scheduler_output: Any) -> SchedulerMeta:
        """Return the workers' orders for the coming step."""
        self._steps.scheduled(scheduler_output)
        meta = SchedulerMeta(self._engine_id, epoch=self._epoch)
        meta.computes = scheduler_output.total_num_scheduled_tokens > 0
        if self._admission is None:
            return meta
        if self._server is not None:
            self._producer.take_events(self._server.events, meta)
        if self._tiering is not None:
            self._tiering.schedule(scheduler_output, meta)
        self._admission.scheduled(scheduler_output.num_scheduled_tokens)
        self._admission.hand_over(meta)
        if self._config.host_buffer:
            self._save_completed(scheduler_output, meta)
        return meta

    def take_output(self, output: Any) -> None:
        """Handle the workers' reports of the last step."""
        if isinstance(output.kv_connector_worker_meta, WorkerMeta):
            if (stale := output.kv_connector_worker_meta.stale) is not None:
                self._weights_changed(stale)
            if self._tiering is not None:
                self._tiering.take_reports(output.kv_connector_worker_meta)
            self.admission.take_reports(output.kv_connector_worker_meta)
            self._producer.raised(output.kv_connector_worker_meta.raised)
        if output.finished_sending:
            self._producer.sent(output.finished_sending)

    def _weights_changed(self, stale: int) -> None:
        """Exchange nothing any more; use tiers again after a reset.

        Args:
            stale: the last epoch that has seen other weights.
        """
        if not self._changed:
            self._changed = True
            logger.warning(
                "%s: no KV is exchanged with other engines any more, since they compared other weights; "
                "start this engine anew to exchange again", CHANGED,
            )  # fmt: skip
            self._producer.stop_offering()
            if self._peers is not None:
                self._peers.stop_reading(CHANGED)
        if self._tiering is not None and stale >= self._epoch:
            logger.warning("%s, and its cache was not reset: %s", CHANGED, RESET)
            self._tiering.suspend(f"{CHANGED}, and its cache was not reset: {RESET}")

    def reset(self) -> None:
        """Make everything that was kept so far unusable."""
        self._epoch += 1
        self._turn_names.start_anew()
        self._producer.reset()
        if self._peers is not None:
            self._peers.start_anew()
        if self._tiering is not None:
            self._tiering.start_anew()

    def take_stats(self) -> FerryStats | None:
        """Return what was counted since the last call; vLLM calls it once per step, after its output."""
        self._steps.done()
        if self._tiering is not None:
            self._tiering.teller.tell()
        counted = self._fold.take()
        return FerryStats.of(counted) if counted else None

    def shutdown(self) -> None:
        """End all threads."""
        self._explaining.close()
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.close()
        if self._tiering is not None:
            self._tiering.shutdown()
        self._client = self._server = self._tiering = None

    def _save_completed(self, scheduler_output: Any, meta: SchedulerMeta) -> None:
        """Order copies of prompts that the coming step completes to the host buffer, before their offer."""
        state = scheduler_output.kv_connector_block_state
        for request in self._producer.completed_by(scheduler_output.num_scheduled_tokens):
            tokens, name = request.num_prompt_tokens, request.request_id
            whole = self.parts.without(name, state.resolve_block_ids(name))
            tables = self._producer.tables(whole, tokens)
            meta.saves.append((tuple(tables), tokens))


def sorted_cards(metadata: dict[tuple[int, int], Any]) -> tuple[WorkerCard, ...]:
    """Return the workers' cards, sorted by (pp_rank, tp_rank).

    Raises:
        ConfigError: they belong to another connector.
    """
    cards = [metadata[place] for place in sorted(metadata)]
    for card in cards:
        if not isinstance(card, WorkerCard):
            raise ConfigError(
                f"the workers' handshake is a {type(card).__name__}, not KVFerryConnector's: {ONE_HANDSHAKE}"
            )
    return tuple(cards)


def _check_all(theirs: tuple[RankCard, ...], ours: tuple[RankCard, ...]) -> None:
    """Raise Incompatible unless each of our ranks can read what it needs."""
    peer, here = ([card.geometry for card in cards] for cards in (theirs, ours))
    absent = absent_layer_names(peer, here)
    if found := [text for rank in here for text in window_mismatches(peer, rank)]:
        raise Incompatible(list(dict.fromkeys(found)))
    if absent:
        logger.warning(
            "the peer does not keep %d layer(s) of our draft model, %s for one: prompts from there are "
            "loaded without them, and fewer drafts are accepted; run both with the same draft model if that "
            "matters", len(absent), absent[0],
        )  # fmt: skip


def full_attention_block(ranks: list[RankGeometry]) -> tuple[int, float]:
    """Return (tokens, bytes) of a block if all layers had the widest attention of the model."""
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
