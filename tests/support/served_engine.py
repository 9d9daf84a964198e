"""An engine without a model: the real scheduler half, over workers and storage that answer at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from unittest.mock import patch

from kvferry.cache.sessions import SessionName
from kvferry.cache.tier_queue import TierQueue
from kvferry.connector.choosing import LocalPrefix
from kvferry.connector.config import ConnectorConfig, parse_config
from kvferry.connector.engine import CacheGroup, DescribeBlocks, EngineFacts, PlainRequest, PlainStep
from kvferry.connector.events import EventStream
from kvferry.connector.messages import StepReports, WorkerInfo
from kvferry.connector.scheduler import SchedulerHalf
from kvferry.connector.tiers.hinting import Hinting
from kvferry.geometry import Group, GroupKind, RankGeometry
from kvferry.planning.select import first_attended
from kvferry.tiers.eviction.policies import LRU
from kvferry.tiers.files.tier import FileTier
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.index import KeyTable
from kvferry.tiers.names import FLEET, GetOutcome, PutOutcome
from kvferry.tiers.paths import EntryKind, key_of, walk
from kvferry.tiers.tenants import Tenants
from kvferry.tiers.write_filter import WriteFilter
from kvferry.tools.replay.engine import NO_PREFIX
from kvferry.tools.replay.settings import ADMIT_ALL, AdmissionSetting, ServedModel
from kvferry.transport.messages import Facts
from kvferry.transport.read_plan import LoadFigures, Report
from support.block_pool import Block, BlockPool
from support.engine_info import made_up
from support.slow_tiers import FakeTier
from support.stores import NAMESPACE

BLOCKS = 1000
"""Blocks of the pool: so many that no request waits and no store is left out for want of them."""
_NOTES_BYTES = 4096
"""More than the notes and the ledger of a directory, and less than a chunk."""


class LRUTier(FakeTier):
    """Storage with a capacity. It evicts the chunks whose use was recorded the longest time ago."""

    def __init__(self, name: str, capacity: int, sizes: Mapping[str, int], table: KeyTable) -> None:
        super().__init__(name, (), table)
        self._policy, self._sizes, self._capacity = LRU(capacity), sizes, capacity

    def put(self, key: bytes, group: ChunkGroup, body: memoryview, cold: bool = False) -> PutOutcome:
        if key in self._policy:
            return PutOutcome.PRESENT
        size = self._sizes[group.name]
        while self._policy.used_bytes + size > self._capacity:
            victim = self._policy.evict()
            if victim is None:
                return PutOutcome.FULL
            self.keys.discard(victim)
        self._policy.admit(key, size, cold=cold)
        self.keys.add(key)
        return PutOutcome.STORED

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        assert key in self._policy
        return GetOutcome.HIT

    def mark_used(self, keys: Sequence[bytes]) -> None:
        self._policy.make_newest(keys)

    @property
    def held(self) -> set[bytes]:
        return {*self._policy._queue._unpinned, *self._policy._cold._unpinned}


class Directory(FileTier):
    """The file tier that serves, with room for files of `capacity` bytes beside its own notes.

    Its clock leaps with each look at it, so each use of a file is worth a new time.
    """

    name = "file"

    def __init__(self, path: Path, capacity: int, table: KeyTable) -> None:
        leaps = count(2_000_000_000, 1000)
        super().__init__(
            path,
            NAMESPACE,
            capacity=capacity + _NOTES_BYTES,
            page_cache=0,
            clock=lambda: float(next(leaps)),
            table=table,
            max_listed=4,
        )

    @property
    def held(self) -> set[bytes]:
        files = (Path(entry.path) for entry in walk(self._root) if entry.kind is EntryKind.CHUNK)
        return {key for path in files if (key := key_of(path.name)) is not None}


class OthersMemory(FakeTier):
    """The host memory of the engines of a fleet. They answer at once and never change meanwhile."""

    read_only = True
    find_seconds = 1.0

    def __init__(self, fleet: Sequence[ServedEngine], table: KeyTable) -> None:
        super().__init__(FLEET, (), table)
        self._fleet = fleet

    def find(self, keys: Sequence[bytes], hints: Sequence[tuple[str, int]] = ()) -> None:
        held = set[bytes]().union(*(engine.host for engine in self._fleet))
        for key in held.intersection(keys):
            self.keys.add(key)

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        assert any(key in engine.host for engine in self._fleet)
        return GetOutcome.HIT

    def mark_used(self, keys: Sequence[bytes]) -> None:
        pass


class _AtOnce:
    """In place of threads: a job runs when it is queued."""

    def __init__(self, number: int, name: str) -> None:
        pass

    def put(self, job, _rank) -> None:
        job()

    def close(self, ends: float) -> bool:
        return True


class _Queue(TierQueue):
    """A queue whose tier learns at once which chunks were used."""

    def mark_used(self, keys: Sequence[bytes]) -> None:
        super().mark_used(keys)
        self._record_uses()


@dataclass(frozen=True)
class Found:
    """Tokens of a prompt that an engine did not compute: its own, and from each tier."""

    local_tokens: int
    tier_tokens: tuple[int, ...]


class Blocks:
    """The block tables of a request. Blocks that the next token does not attend to are null."""

    def __init__(self, groups: Sequence[Group], pool: BlockPool) -> None:
        self._groups, self._pool = groups, pool
        self.blocks: list[list[Block]] = [[] for _ in groups]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in table] for table in self.blocks)

    def cover(self, tokens: int, computed: int) -> None:
        """Have blocks for these tokens, and leave those that are not needed after the computed ones."""
        null = self._pool.blocks[0]
        for group, table in zip(self._groups, self.blocks, strict=True):
            gone = max(first_attended(group, computed), 0) // group.block_tokens
            for at in range(min(gone, len(table))):
                if not table[at].is_null:
                    self._pool.free_blocks([table[at]])
                    table[at] = null
            table.extend([null] * (gone - len(table)))
            new = self._pool.allocate(max(-(-tokens // group.block_tokens) - len(table), 0))
            assert new is not None, "the pool is large enough for all tests"
            table.extend(new)

    def free(self) -> None:
        for table in self.blocks:
            self._pool.free_blocks(block for block in table if not block.is_null)
            table.clear()


class ServedEngine:
    """Serves one request after the other, with the code that serves. Nothing is copied.

    All copies, reads and writes have ended when the next step begins.
    """

    def __init__(
        self,
        model: ServedModel,
        rank: RankGeometry,
        facts: EngineFacts,
        config: ConnectorConfig,
        tiers: Sequence[LRUTier | Directory | OthersMemory],
        events: EventStream | None = None,
        describe_blocks: DescribeBlocks | None = None,
    ) -> None:
        self._model, self._rank, self.tiers = model, rank, tiers
        self._pool = BlockPool(BLOCKS)
        self._names = count()
        self._local = NO_PREFIX
        self.now = 0.0
        kinds = {group.kind for group in model.groups}
        self._completes = kinds == {GroupKind.FULL, GroupKind.STATE}
        self.half = SchedulerHalf(
            facts,
            config,
            [WorkerInfo(geometry=rank, card=None)],
            self._pool,
            events=events,
            facts=lambda incarnation: Facts("e", incarnation, "test", {}),
            namespace=lambda _: None,
            prefix_cache=self if self._completes else None,
            describe_blocks=describe_blocks,
        )
        self.hinting._clock = self.hinting._prefetches._clock = lambda: self.now

    @property
    def hinting(self) -> Hinting:
        return self.half._tiering._hinting

    @property
    def queues(self) -> Sequence[TierQueue]:
        return self.half._tiering._cache.slow_tiers

    @property
    def host(self) -> set[bytes]:
        """Keys of the chunks in host memory."""
        tier = self.half._tiering._cache.host
        tier.check_integrity()
        return set(tier._ready)

    def resumable_tokens(self, request: PlainRequest) -> int:
        return self._local.resumable_tokens

    def shorten(self, request: PlainRequest, tokens: int) -> None:
        assert tokens < self._local.tokens
        self._local = LocalPrefix(tokens, min(self._local.resumable_tokens, tokens))

    def serve(
        self, prompt: list[int], answer: list[int], local: LocalPrefix = NO_PREFIX, **more: object
    ) -> Found:
        """Serve a request of whose prompt the engine has a prefix. `more` are fields of `PlainRequest`."""
        for tier in self.tiers:
            if isinstance(tier, OthersMemory):
                tier.keys.clear()  # answers to earlier questions are forgotten after a while
        request = PlainRequest(request_id=f"r{next(self._names)}", prompt_token_ids=prompt, **more)
        self._local = (
            local if self._completes else LocalPrefix(local.resumable_tokens, local.resumable_tokens)
        )
        blocks = Blocks(self._rank.groups, self._pool)
        self.half.on_new_request(request)
        shared = local.tokens if local.resumable_tokens < local.tokens else 0
        if not self._completes:
            request.snapshot_at = shared
        found = self._load(request, blocks)
        # vLLM forgets the prefix that it shares with another prompt if a load completes it.
        if self._completes and shared and not any(found.tier_tokens):
            request.snapshot_at = shared
        for end, snapshot in self._prefill(request):
            self._compute(request, blocks, end, snapshot=snapshot)
        for token in answer[:-1]:
            request.answer_token_ids.append(token)
            self._compute(request, blocks, request.num_tokens)
        request.answer_token_ids += answer[-1:]
        request.is_complete = True
        self.half.finished(request, blocks.get_block_ids())
        blocks.free()
        self._settle()
        assert self._pool.get_num_free_blocks() == BLOCKS - 1
        return found

    def prefetch_session(self, session: SessionName) -> None:
        """Bring the chunks of a session's last request to host memory, if the engine knows the session."""
        if self.hinting._sessions.last(session) is not None and self.hinting._retained.most_bytes:
            self.hinting.prefetch_session(session)
            self._settle()

    def _load(self, request: PlainRequest, blocks: Blocks) -> Found:
        while (tokens := self.half.admission.matched(request, self._local.tokens)) is None:
            self._step(PlainStep(tokens={}))
        self.half.place_snapshots(request, self._local.tokens + tokens)
        local = self._local.tokens if tokens else self._local.resumable_tokens
        total = local + tokens
        blocks.cover(total, total)
        self.half.admission.allocated(request, blocks.blocks, tokens)
        parts = dict.fromkeys(("host", *(tier.name for tier in self.tiers)), 0)
        if tokens:
            (load,) = self.half.admission._states[request.request_id].loads
            for part in load.load.bid.parts:
                parts[part.place] += part.tokens
            while self.half.admission.loads:
                self._step(PlainStep(tokens={}))
            self._settle()
        request.num_computed_tokens = min(total, request.num_prompt_tokens - 1)
        return Found(local, tuple(parts.values()))

    def _prefill(self, request: PlainRequest) -> Iterator[tuple[int, bool]]:
        """End of every step that computes the prompt, and whether the engine takes a snapshot there."""
        steps, prompt = self._model.form.steps, request.num_prompt_tokens
        if self._model.state is None:
            size = steps.step_tokens
            ends = (*range(request.num_computed_tokens + size, prompt, size), prompt)
            yield from ((end, False) for end in ends)
            return
        while (start := request.num_computed_tokens) < prompt:
            at = request.snapshot_at  # read anew for each step, as vLLM does
            end = next(steps.step_ends(prompt, start, at))
            yield end, end in set(steps.positions(prompt, start, at))

    def _compute(self, request: PlainRequest, blocks: Blocks, end: int, *, snapshot: bool = False) -> None:
        name = request.request_id
        blocks.cover(end, request.num_computed_tokens)
        snapshots = [
            (number, blocks.blocks[number][end // group.block_tokens - 1].block_id, end)
            for number, group in enumerate(self._rank.groups)
            if snapshot and group.kind is GroupKind.STATE
        ]
        self._step(
            PlainStep(
                tokens={name: end - request.num_computed_tokens},
                tables={name: blocks.get_block_ids()},
                snapshots={name: snapshots} if snapshots else {},
            )
        )
        request.num_computed_tokens = end
        self._settle()

    def _step(self, step: PlainStep) -> None:
        """Run a step whose copies all succeed."""
        orders, reports = self.half.orders(step), StepReports()
        parts = [part for part in orders.parts if part.work is not None]
        for order in (*(part.work for part in parts), *orders.stores):
            sizes = [0] * len(self._model.groups)
            reports.reports[order.key] = Report(None, figures=LoadFigures(bytes_by_group=tuple(sizes)))
        for part in orders.parts:
            assert part.failure is None, part.failure
            if part.last:
                reports.reports[part.load] = Report(None)
        self.half.take_reports(reports)
        self.half.step_done()

    def _settle(self) -> None:
        """Run steps until all stores and writes have ended."""
        while self.half.busy:
            self._step(PlainStep(tokens={}))


@contextmanager
def served_engine(
    model: ServedModel,
    rank: RankGeometry,
    *,
    host_bytes: int,
    policy: str = "lru",
    slow: Mapping[str, int],
    admission: AdmissionSetting = ADMIT_ALL,
    fleet: Sequence[ServedEngine] = (),
    files: Path | None = None,
    events: EventStream | None = None,
    describe_blocks: DescribeBlocks | None = None,
    **more: object,
) -> Iterator[ServedEngine]:
    """Start an engine with host memory and slow tiers of these capacities in bytes, and `more` settings.

    The engine reads the host memory of the engines in `fleet` if `slow` names a fleet tier. With `files`, its
    file tier is the one that serves, in this directory.
    """
    sizes = {one.group.label: one.file_bytes for one in model.form.groups}
    tiers: list[LRUTier | Directory | OthersMemory] = []

    def tier_of(name: str, capacity: int, table: KeyTable) -> LRUTier | Directory | OthersMemory:
        if name == FLEET:
            return OthersMemory(fleet, table)
        if name == "file" and files is not None:
            return Directory(files, capacity, table)
        return LRUTier(name, capacity, sizes, table)

    def opened(_, namespace, table, place, exchange, tenants: Tenants | None):
        tiers.extend(tier_of(name, capacity, table) for name, capacity in slow.items())
        for tier in tiers if tenants else ():
            tier.use_tenants(tenants)
        queues = [
            _Queue(
                tier,
                tier.name,
                write_filter=WriteFilter(admission.min_uses, admission.min_prompt_tokens),
                refresh_seconds=None,
                start_threads=_AtOnce,
            )
            for tier in tiers
        ]
        return [(queue, 1.0) for queue in queues]

    config = parse_config(
        {
            "tiers": [{"type": "host", "capacity": f"{host_bytes}B", "eviction_policy": policy}],
            "chunk_tokens": model.chunk_tokens,
            "snapshot_tokens": model.form.snapshot_tokens,
            "first_snapshot_tokens": model.form.requested_first,
            **more,
        }
    )
    groups = tuple(
        CacheGroup(
            kind=group.kind,
            attention_span=group.attention_span,
            block_tokens=one.block_tokens,
            **(
                {"state_block_tokens": one.block_tokens, "snapshot_tokens": one.block_tokens}
                if group.kind is GroupKind.STATE
                else {}
            ),
        )
        for group, one in zip(rank.groups, model.block_groups, strict=True)
    )
    facts = made_up(groups=groups, num_blocks=BLOCKS, step_tokens=model.form.steps.step_tokens)
    with patch("kvferry.connector.tiers.opening.open_tiers", opened):
        engine = ServedEngine(model, rank, facts, config, tiers, events, describe_blocks)
    try:
        yield engine
    finally:
        engine.half.shutdown()
