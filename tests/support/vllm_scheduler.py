"""A driver of vLLM's own scheduler and cache manager over kvferry's admission, without a model and workers.

The output of a step arrives as late as the engine's pipeline is deep. The driver knows which blocks each step
writes, so it notices when a load is given one of them.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvferry.connector.admission import Admission
from kvferry.connector.bids import Bid, PlaceTokens, Speeds
from kvferry.connector.blocks import Headroom, PartBlocks
from kvferry.connector.choosing import BidChooser
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.content import Adapters, TurnNames
from kvferry.connector.events import EventStream, LeaseEnded, LeaseGranted, MissReason, SourceMiss
from kvferry.connector.messages import Load, LoadPart, StepReports
from kvferry.connector.peers.producer import Producer
from kvferry.connector.peers.source import PeerSource
from kvferry.connector.source import Answer, RunningLoads
from kvferry.connector.tiers.source import TierSource
from kvferry.engines.vllm.compat.requests import request_wrapper
from kvferry.engines.vllm.compat.scheduler import VLLMPrefixCache, defer_frees
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.messages import SchedulerMeta, WorkerMeta
from kvferry.engines.vllm.multi.connector import FerryMultiConnector
from kvferry.engines.vllm.scheduler import engine_info
from kvferry.geometry import Group
from kvferry.tiers.names import TIERS
from kvferry.transport.control_server import LeaseClaims
from kvferry.transport.read_plan import Report
from support.producers import played_channel
from support.vllm_cache import BLOCK, KINDS, STEP
from support.vllm_config import inspect_models_here

LONGEST = 400
ATTEMPTS, PATIENCE = 2, 10.0


@cache
def _model() -> ModelConfig:
    """The configuration of a model that is never built."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 2048, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "max_position_embeddings": LONGEST,
    }  # fmt: skip
    inspect_models_here()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        return ModelConfig(folder, skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST)


def _speculation(model: ModelConfig, drafts: int) -> SpeculativeConfig:
    """Settings of an engine whose drafts keep no KV cache."""
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=drafts,
        prompt_lookup_max=4,
        prompt_lookup_min=1,
        target_model_config=model,
        target_parallel_config=ParallelConfig(),
    )


@dataclass
class Played:
    """A source that offers what a test says; its loads end as the test says.

    Attributes:
        name: of the source.
        total: tokens of each request that it has from the first on.
        strikes: whether it is struck out when a load of it fails.
        most_held: blocks that loads may hold, in flight and late; None without bound.
    """

    name: str
    total: dict[str, int] = field(default_factory=dict)
    strikes: bool = True
    most_held: int | None = None
    book: Any = None
    begun: list[Load] = field(default_factory=list)
    _excluded: dict[str, dict[str, str]] = field(default_factory=dict)

    def arrived(self, request: Any, excluded: dict[str, str]) -> bool:
        self._excluded[request.request_id] = excluded
        return True

    def ask(self, request: Any, local_tokens: int) -> Answer:
        tokens = min(self.total.get(request.request_id, 0), request.num_tokens) - local_tokens
        bids = [Bid(self.name, (PlaceTokens(self.name, tokens),))] if tokens > 0 else []
        return Answer(bids, lambda: SourceMiss(self.name, MissReason.NOT_STORED))

    def has_room(self, bid: Bid, blocks: int) -> bool:
        """Ask kvferry's own sources, which differ: only what peers write can land late."""
        if self.most_held is None:
            return True
        return (TierSource if self.name == TIERS else PeerSource).has_room(self, bid, blocks)

    @property
    def _loads(self) -> Any:
        return self.book

    @property
    def _most_held(self) -> int | None:
        return self.most_held

    def begin(self, load: Load, request: Any) -> PlayedFeed:
        self.begun.append(load)
        return PlayedFeed(self, load)

    def alignments(self, request_id: str) -> tuple[int, ...]:
        return (BLOCK,) * self.groups

    def settled(self, request_id: str) -> None: ...

    def finished(self, request_id: str) -> None: ...


@dataclass
class PlayedFeed:
    """A load of such a source, which has one part."""

    source: Played
    load: Load

    @property
    def origin(self) -> str:
        return self.source.name

    def next_parts(self) -> Sequence[LoadPart]:
        return [LoadPart(self.load.key, None, last=True)]

    def drop(self) -> None: ...

    def moved(self, report: Report) -> tuple[Any, ...]:
        return ()

    def miss(self, report: Report) -> MissReason:
        return MissReason.FAILED

    def ended(self, report: Report, *, wanted: bool) -> None:
        if wanted and report.failure is not None and self.source.strikes:
            self.source._excluded[self.load.request_id].setdefault(self.source.name, report.failure)


class WithoutWorkers(KVConnectorBase_V1, SupportsHMA):
    """A connector of an engine that has no workers: the hooks of its worker half do nothing."""

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...

    def wait_for_layer_load(self, *_: Any) -> None: ...

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class PlayedConnector(WithoutWorkers):
    """kvferry's admission as `KVFerryConnector` calls it, over sources that are played.

    Settings (``kv_connector_extra_config``): `clock`, and `defers`: whether vLLM is made to defer frees, as
    `KVFerryConnector` does.

    Attributes:
        sources: both sources.
        admissions: number of admissions of each request since tokens of it were last computed.
        most: largest of these numbers so far.
        loads: (tokens in the engine before, after, tokens of the request) of each load that began.
        found: tokens of its own prefix cache that vLLM reported last, by request.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.clock = settings.get("clock", time.monotonic)
        if settings.get("defers", True):
            defer_frees(vllm_config)

    def bind_kv_cache_manager(self, manager: Any) -> None:
        self.prefix_cache = VLLMPrefixCache.of(manager)
        super().bind_kv_cache_manager(manager)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return self.prefix_cache is not None

    def bind_gpu_block_pool(self, pool: Any) -> None:
        config = self._kv_cache_config
        self.engine = engine_info(self._vllm_config, config)
        groups = [Group(one.kind, one.block_tokens, one.attention_span, ()) for one in self.engine.groups]
        self.wrap = request_wrapper(self._vllm_config, config)
        self.sources = [Played("tiers"), Played("peer")]
        self.admissions, self.most = Counter[str](), 0
        self.loads: list[tuple[int, int, int]] = []
        self.found: dict[str, int] = {}
        config, self.parts = ConnectorConfig(), PartBlocks(groups, pool)
        self.book = RunningLoads(
            self.engine.groups,
            workers=1,
            pool=pool,
            timeout_seconds=config.load_timeout_seconds,
            clock=self.clock,
        )
        for source in self.sources:
            source.book, source.groups = self.book, len(groups)
        self.admission = Admission(
            self.engine.groups,
            loads=self.book,
            parts=self.parts,
            headroom=Headroom.of(self.engine.groups, self.engine.step_tokens, pool),
            attempts=ATTEMPTS,
            sources=self.sources,
            chooser=BidChooser(config.source_policy, Speeds(self.clock), PATIENCE),
            events=EventStream(),
            prefix_cache=self.prefix_cache,
            clock=self.clock,
        )

    def on_new_request(self, request: Any) -> None:
        self.admission.on_new_request(self.wrap(request))

    def get_num_new_matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        tokens = self.admission.matched(self.wrap(request), local_tokens)
        self.asked = self.found[request.request_id] = local_tokens
        return tokens, bool(tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        self.admissions[request.request_id] += 1
        self.most = max(self.most, self.admissions[request.request_id])
        if external:
            self.loads.append((self.asked, self.asked + external, request.num_tokens))
        self.admission.allocated(self.wrap(request), blocks.blocks, external)

    def build_connector_meta(self, output: Any) -> SchedulerMeta:
        meta = SchedulerMeta("e")
        for name in output.num_scheduled_tokens:
            self.admissions[name] = 0
        self.admission.schedule(output.num_scheduled_tokens.keys(), meta.orders)
        return meta

    def update_connector_output(self, output: Any) -> None:
        if output.kv_connector_worker_meta is not None:
            self.admission.take_reports(output.kv_connector_worker_meta.reports)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self.admission.finished(request.request_id)
        self.parts.forget(request.request_id)
        return False, None


class OfferingConnector(PlayedConnector):
    """A connector of an engine that also computes prompts for others, and keeps them under leases.

    Attributes:
        producer: kvferry's.
        leases: leases that have not ended, oldest first.
        heard: messages of consumers, which the next step handles.
    """

    def bind_gpu_block_pool(self, pool: Any) -> None:
        super().bind_gpu_block_pool(pool)
        adapters = Adapters()
        self.leases: list[str] = []
        self.producer = Producer(
            self.engine,
            ConnectorConfig(),
            incarnation=1,
            events=EventStream(self._on_event),
            names=TurnNames(adapters),
            adapters=adapters,
            channel=played_channel(),
            pool=pool,
            workers=1,
            clock=self.clock,
        )
        self.heard: deque[LeaseClaims] = deque()
        self.ended: set[str] = set()

    def _on_event(self, event: Any) -> None:
        if isinstance(event, LeaseGranted):
            self.leases.append(event.request_id)
        elif isinstance(event, LeaseEnded):
            self.leases.remove(event.request_id)

    def on_new_request(self, request: Any) -> None:
        self.producer.on_new_request(self.wrap(request))
        super().on_new_request(request)

    def build_connector_meta(self, output: Any) -> SchedulerMeta:
        meta = super().build_connector_meta(output)
        self.producer.take_events(self.heard, meta.orders)
        self.ended |= meta.orders.ended.keys()
        return meta

    def update_connector_output(self, output: Any) -> None:
        super().update_connector_output(output)
        if output.finished_sending:
            self.producer.sent(output.finished_sending)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished_all_groups(request, block_ids)
        return self.producer.finished(self.wrap(request), block_ids)


SETTINGS: dict[type[KVConnectorBase_V1], dict[str, Any]] = {
    KVFerryConnector: {},
    FerryMultiConnector: {
        "connectors": [
            {"kv_connector": "KVFerryConnector", "kv_connector_module_path": KVFerryConnector.__module__}
        ]
    },
}
"""Settings with which each of kvferry's own connectors starts."""


class VllmScheduler:
    """vLLM's scheduler with a pipeline of one step, or of two under asynchronous scheduling.

    Attributes:
        scheduler: vLLM's.
        connector: its `PlayedConnector`.
        answered: requests that have ended by themselves.
        usage: what vLLM reports about the prompt of each request with its first token.
        torn: blocks that a load was given while a step in flight still writes them.
        misplaced: (state's block of a load, block where the first step after it looks), where they differ.
        continued: number of first steps after loads that went on from a loaded state.
        accepted: number of accepted drafts.
    """

    def __init__(
        self,
        kinds: Sequence[str] = ("full",),
        blocks: int = 60,
        *,
        overlaps: bool = False,
        role: str = "kv_both",
        seed: int = 0,
        seats: int = 4,
        connector: type[KVConnectorBase_V1] = PlayedConnector,
        settings: dict[str, Any] | None = None,
        drafts: int = 0,
        prefix_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
        engine_id: str = "engine",
    ) -> None:
        """Start a scheduler.

        Args:
            kinds: kinds of the KV cache groups, of `KINDS`.
            blocks: number of blocks in the pool.
            overlaps: whether scheduling is asynchronous.
            role: of the connector.
            seed: of sampled tokens and accepted drafts.
            seats: maximum number of running requests.
            connector: class of the connector.
            settings: ``kv_connector_extra_config``.
            drafts: maximum number of draft tokens per step.
            prefix_caching: whether the engine has a prefix cache.
            clock: of the admission and the producer, monotonic seconds.
            engine_id: id of the engine.
        """
        init_none_hash(sha256)
        self._drafts = drafts
        self._draw, self._depth = random.Random(seed), 1 + overlaps
        specs = {**KINDS, "state": replace(KINDS["state"], num_speculative_blocks=drafts)}
        groups = [KVCacheGroupSpec([f"layer {n}"], specs[kind]) for n, kind in enumerate(kinds)]
        config = KVCacheConfig(blocks, [], groups)
        cache_config = CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching)
        cache_config.num_gpu_blocks = blocks
        if "state" in kinds:
            cache_config.mamba_cache_mode = "align"
            cache_config.mamba_block_size = BLOCK
        scheduling = SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=STEP,
            max_model_len=LONGEST,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        )
        played = {"clock": clock} if issubclass(connector, PlayedConnector) else {}
        transfer = KVTransferConfig(
            kv_connector=connector.__name__,
            kv_connector_module_path=connector.__module__,
            kv_connector_extra_config={**played, **(settings or {})},
            kv_role=role,
            kv_load_failure_policy="recompute",
            engine_id=engine_id,
        )
        model = _model()
        vllm_config = VllmConfig(
            model_config=model,
            cache_config=cache_config,
            scheduler_config=scheduling,
            kv_transfer_config=transfer,
            speculative_config=_speculation(model, drafts) if drafts else None,
        )
        vllm_config.scheduler_config.async_scheduling = overlaps  # the platform for CPUs turns it off
        kind = AsyncScheduler if overlaps else Scheduler
        self.scheduler = kind(
            vllm_config=vllm_config,
            kv_cache_config=config,
            block_size=BLOCK,
            hash_block_size=BLOCK,
            structured_output_manager=SimpleNamespace(
                accept_tokens=lambda *_: True,
                should_advance=lambda _: False,
                validate_tokens=lambda _, tokens: tokens,
            ),
        )
        self.connector: PlayedConnector = self.scheduler.connector
        self.block_hasher = get_request_block_hasher(BLOCK, sha256)
        self._in_flight: deque[Any] = deque()
        self._writes: deque[set[int]] = deque()
        self.loading: list[Load] = []
        self._late: list[Load] = []
        self._ended: dict[str, str | None] = {}
        self.answered: set[str] = set()
        self.usage: dict[str, PrefillStats] = {}
        self.torn: list[int] = []
        self._landed: dict[str, Load] = {}
        self.misplaced: list[tuple[int, int]] = []
        self.continued = self.accepted = 0
        self.count = 0

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def ask(
        self, tokens: Sequence[int], answer: int = 3, sampling: dict[str, Any] | None = None, **totals: int
    ) -> Request:
        """Add a request; `totals` are tokens of it that each source has."""
        self.count += 1
        one = Request(
            f"r{self.count}",
            list(tokens),
            SamplingParams(max_tokens=answer, ignore_eos=True, **(sampling or {})),
            None,
            block_hasher=self.block_hasher,
        )
        for source in self.connector.sources:
            source.total[one.request_id] = totals.get(source.name, 0)
        self.scheduler.add_request(one)
        return one

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def preempt(self) -> None:
        """Preempt the request that was admitted last, as the scheduler does where there is no block left."""
        self.scheduler._preempt_request(self.scheduler.running.pop(), 0.0)

    def step(self) -> None:
        """Schedule a step, and take the output of the oldest one if the pipeline is full."""
        output = self.scheduler.schedule()
        samples = {name for name in output.num_scheduled_tokens if not self._prefills(name)}
        self._in_flight.append((output, samples))
        self._writes.append(self.blocks_written(output))
        self._look_at_states(output)
        for source in self.connector.sources:
            for load in source.begun:
                held = {block.block_id for block in self.connector.book[load.key].blocks}
                self.torn += sorted(held.intersection(*[set().union(*self._writes)]))
            self.loading += source.begun
            source.begun.clear()
        if len(self._in_flight) >= self._depth:
            self._writes.popleft()
            self._take_output(*self._in_flight.popleft())

    def end(self, load: Load, failure: str | None = None, *, late: bool = False) -> None:
        """End a load. The transfers of a late load end with `land`."""
        self.loading.remove(load)
        if failure is None:
            self._landed[load.request_id] = load
        meta = StepReports(reports={load.key: Report(failure, late=late)})
        if late:
            self._late.append(load)
        self._report(meta, {load.request_id}, {load.request_id} if failure is not None else set())

    def land(self) -> None:
        """End the transfers of all late loads."""
        while self._late:
            self._report(StepReports(released={self._late.pop().key: 1}), set(), set())

    def confirm_ended_leases(self) -> None:
        """Report that the workers of an `OfferingConnector` have raised the words of leases that end."""
        ended, self.connector.ended = self.connector.ended, set()
        self._report(StepReports(), set(), set(), ended)

    def _report(
        self, meta: StepReports, done: set[str], failed: set[str], sent: AbstractSet[str] = frozenset()
    ) -> None:
        from vllm.v1.core.sched.output import SchedulerOutput

        empty = SchedulerOutput.make_empty()
        known = {name for name in done if name in self.scheduler.requests}
        heard = KVConnectorOutput(
            finished_sending=set(sent),
            finished_recving=known,
            failed_recving=failed & known,
            kv_connector_worker_meta=WorkerMeta(meta),
        )
        self.scheduler.update_from_output(empty, ModelRunnerOutput([], {}, kv_connector_output=heard))

    def _look_at_states(self, output: Any) -> None:
        """Compare where the first step after a load looks for a state with where the load brought it."""
        for name, count in output.num_scheduled_tokens.items():
            load = self._landed.pop(name, None)
            before = self.scheduler.requests[name].num_computed_tokens - count
            if load is None or before != load.span.total:
                continue
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            groups = self.connector._kv_cache_config.kv_cache_groups
            for table, loaded, group in zip(tables, load.tables, groups, strict=True):
                if isinstance(group.kv_cache_spec, MambaSpec):
                    self.continued += 1
                    found = table[(before - 1) // BLOCK]
                    self.misplaced += [(int(block), found) for block in loaded if block != found]

    def blocks_written(self, output: Any) -> set[int]:
        """Return the blocks that a step writes. Called once when the step is scheduled."""
        found: set[int] = set()
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            last = request.num_computed_tokens
            for table, group in zip(
                self.scheduler.kv_cache_manager.get_block_ids(name),
                self.connector._kv_cache_config.kv_cache_groups,
                strict=True,
            ):
                size = group.kv_cache_spec.block_size
                # Drafts write the states after each of them into the blocks that follow the running one.
                scratch = getattr(group.kv_cache_spec, "num_speculative_blocks", 0)
                found.update(table[(last - count) // size : -(-last // size) + scratch])
        return found - {0}

    def _prefills(self, name: str) -> bool:
        return bool(self.scheduler.requests[name].is_prefill_chunk)

    def _take_output(self, output: Any, samples: set[str]) -> None:
        names = list(output.num_scheduled_tokens)
        sampled = [self._sampled(output, name) if name in samples else [] for name in names]
        ran = ModelRunnerOutput(names, {name: n for n, name in enumerate(names)}, sampled)
        for outputs in self.scheduler.update_from_output(output, ran).values():
            self.answered |= {one.request_id for one in outputs.outputs if one.finished}
            reported = {one.request_id: one.prefill_stats for one in outputs.outputs}
            self.usage |= {name: stats for name, stats in reported.items() if stats is not None}
        if self._drafts and self._depth == 1:  # asynchronously, workers keep drafts to themselves
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [self._drafted() for _ in names]))

    def _sampled(self, output: Any, name: str) -> list[int]:
        """The drafts of a request that are accepted, as many as may be, and the token after them."""
        accepted = self._draw.randint(0, len(output.scheduled_spec_decode_tokens.get(name, [])))
        self.accepted += accepted
        return [self._draw.randrange(1000) for _ in range(accepted + 1)]

    def _drafted(self) -> list[int]:
        return [self._draw.randrange(1000) for _ in range(self._draw.randint(0, self._drafts))]
