"""Loads that fill blocks in part, over vLLM's own cache manager: what its prefix cache gives is there."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvferry.connector.part_blocks import PartBlocks
from kvferry.geometry import Group, GroupKind
from kvferry.planning.select import LoadSpan, first_attended, needed_tokens

pytestmark = pytest.mark.slow

F, S = GroupKind.FULL, GroupKind.SLIDING
SHAPES = {
    "same": [(F, 16, 0), (S, 16, 20)],
    "narrow": [(F, 16, 0), (S, 16, 7)],
    "three": [(F, 16, 0), (S, 16, 20), (S, 16, 50)],
    "smaller": [(F, 64, 0), (S, 16, 50)],
    "odd": [(F, 48, 0), (S, 16, 40), (S, 24, 40)],
    "larger": [(F, 16, 0), (S, 32, 40)],
    "only": [(S, 16, 40)],
}
"""Groups of an engine: kind, tokens of a block, attention span. (Of chunked attention no block is ever filled
in part: it begins to look where a block begins.)"""
MODES = {
    "dense": {},
    "latest": {"retention": 0},
    "sparse": {"retention": 2},
    "draft": {"use_eagle": True, "num_prefill_lookahead": 1},
    "drafts": {"use_eagle": True, "num_prefill_lookahead": 3},
}
"""What vLLM keeps in its prefix cache, and how much of a window besides."""
LONGEST, BLOCKS = 380, 120


def spec(kind: GroupKind, block: int, attention_span: int, extra: int) -> Any:
    like = {"block_size": block, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    if kind is F:
        return FullAttentionSpec(**like)
    return SlidingWindowSpec(sliding_window=attention_span, extra_retained_tokens=extra, **like)


@dataclass
class Engine:
    """Requests over a cache manager, whose blocks remember what was written into them.

    Attributes:
        wrong: what a request looked at and was not there, after a hit or as it computes.
        believed: of blocks that were found, what is missing from that on in which the window begins.
        parts: loads that filled a block in part.
        hits: requests that found something.
    """

    shape: str
    draw: random.Random
    retention: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    wrong: list[Any] = field(default_factory=list)
    believed: list[Any] = field(default_factory=list)
    parts: int = 0
    hits: int = 0

    def __post_init__(self) -> None:
        init_none_hash(sha256)
        extra = max(0, self.more.get("num_prefill_lookahead", 0) - 1)
        groups, sizes = SHAPES[self.shape], [block for _, block, _ in SHAPES[self.shape]]
        common, self.unit = math.lcm(*sizes), math.gcd(*sizes)
        self.windows = [attention_span for _, _, attention_span in groups]
        self.groups = tuple(
            Group(kind, size, attention_span + extra * (kind is S), ())
            for kind, size, attention_span in groups
        )
        config = KVCacheConfig(
            BLOCKS,
            [],
            [KVCacheGroupSpec([f"layer {n}"], spec(*one, extra)) for n, one in enumerate(groups)],
            prefix_cache_retention_interval=self.retention and self.retention * common,
        )
        self.manager = KVCacheManager(config, 400, common, self.unit, max_in_flight_tokens=64, **self.more)
        self.watch = PartBlocks(self.groups, self.manager.block_pool)
        self.hasher = get_request_block_hasher(self.unit, sha256)
        self.texts = [[self.draw.randrange(3) + 3 * n for n in range(100)] * 4 for _ in range(2)]
        self.content: dict[int, dict[int, int]] = {}
        self.waiting: list[Request] = []
        self.loading: list[tuple[Request, LoadSpan, list[int]]] = []
        self.promoted: list[Request] = []
        self.running: list[Request] = []
        self.count = 0

    def arrive(self) -> None:
        self.count += 1
        same = self.draw.randrange(1, 260)
        own = [1000 * self.count + n for n in range(self.draw.choice([0, 1, 2, 3, 20]))]
        tokens = self.draw.choice(self.texts)[:same] + own
        params = SamplingParams(max_tokens=100)
        self.waiting.append(Request(f"r{self.count}", tokens, params, None, block_hasher=self.hasher))

    def scheduling_pass(self) -> None:
        """In vLLM's order: what is running, then what waits; some of what could go on does not."""
        for one in list(self.running):
            if self.draw.random() < 0.8:
                self.step(one)
        for one in list(self.promoted):
            if self.draw.random() < 0.6:
                self.go_on(one)
        for loaded in list(self.loading):
            if self.draw.random() < 0.6:
                self.loading.remove(loaded)
                self.promote(*loaded)
        for one in list(self.waiting):
            blocks, local_tokens, _ = self.manager.get_computed_blocks(one)
            if not self.watch.evict():
                self.admit(one, blocks, local_tokens)
        self.watch.end_pass()

    def admit(self, one: Request, blocks: Any, local_tokens: int) -> None:
        self.check_hit(one, blocks.blocks, local_tokens)
        offer = self.draw.choice(
            [0, one.num_tokens - 1, one.num_tokens, self.draw.randrange(one.num_tokens + 1)]
        )
        span = LoadSpan(
            local_tokens,
            max(local_tokens, offer - (offer == one.num_tokens and self.lets_go(offer))),
            one.num_tokens,
        )
        found = {"num_new_computed_tokens": local_tokens, "new_computed_blocks": blocks}
        if span.total == local_tokens:
            if self.compute(one, local_tokens, **found):
                self.waiting.remove(one)
                self.running.append(one)
            return
        loaded = {"num_external_computed_tokens": span.total - local_tokens, "delay_cache_blocks": True}
        if not self.allocate(one, 0, **found, **loaded):
            return
        self.waiting.remove(one)
        self.watch.forget(one.request_id)
        alignments = [self.alignment_tokens(group.block_tokens, local_tokens) for group in self.groups]
        tables = tuple([block.block_id for block in table] for table in self.tables(one))
        self.watch.begin(one, tables, span, alignments)
        self.parts += self.watch.masked_tables(one.request_id, tables) != tables
        one.num_computed_tokens = span.total
        self.loading.append((one, span, alignments))

    def alignment_tokens(self, block: int, local_tokens: int) -> int:
        return self.draw.choice([n for n in range(1, block + 1) if block % n == 0 and local_tokens % n == 0])

    def lets_go(self, total: int) -> bool:
        """The engine would let go of what the last token sees, so that token is not loaded."""
        return any(
            first_attended(one.kind, one.attention_span, total - 1) // one.block_tokens
            != first_attended(one.kind, one.attention_span, total) // one.block_tokens
            for one in self.groups
            if one.attention_span and total >= one.attention_span
        )

    def promote(self, one: Request, span: LoadSpan, alignments: list[int]) -> None:
        for number, (group, alignment_tokens) in enumerate(zip(self.groups, alignments, strict=True)):
            low, high = needed_tokens(group.kind, group.attention_span, span)
            if low < high:
                self.write(
                    one, number, max(low // alignment_tokens * alignment_tokens, span.local_tokens, 0), high
                )
        self.manager.cache_blocks(one, one.num_computed_tokens)
        one.num_computed_tokens -= one.num_computed_tokens == one.num_tokens
        self.promoted.append(one)
        if self.draw.random() < 0.5:
            self.go_on(one)

    def go_on(self, one: Request) -> None:
        if self.compute(one, one.num_computed_tokens):
            self.promoted.remove(one)
            self.running.append(one)

    def step(self, one: Request) -> None:
        fate = self.draw.random()
        if fate < 0.05:  # preempted
            self.manager.free(one)
            one.num_computed_tokens, one.num_preemptions = 0, one.num_preemptions + 1
            self.waiting.append(one)
        elif one.num_tokens <= LONGEST and fate > 0.1 and self.compute(one, one.num_computed_tokens):
            return
        else:
            self.watch.forget(one.request_id)
            self.manager.free(one)
        self.running.remove(one)

    def compute(self, one: Request, first: int, **found: Any) -> bool:
        count = self.draw.randrange(1, one.num_tokens - first + 1)
        if not self.allocate(one, count, **found):
            return False
        self.watch.on_resumed(one.request_id)
        for number, group in enumerate(self.groups):
            self.write(one, number, first, first + count)
            low = first_attended(group.kind, self.windows[number], first) if group.attention_span else 0
            self.wrong += self.missing(one, self.tables(one), number, low, first + count)
        one.num_computed_tokens = first + count
        if one.num_computed_tokens == one.num_tokens:
            one.append_output_token_ids(self.texts[0][one.num_tokens])
        return True

    def allocate(self, one: Request, *args: Any, **more: Any) -> bool:
        found = more.get("new_computed_blocks")
        old = {block.block_id for table in self.tables(one) for block in table}
        old |= {block.block_id for table in (found.blocks if found else ()) for block in table}
        if self.manager.allocate_slots(one, *args, **more) is None:
            return False
        for table in self.tables(one):
            self.content.update({block.block_id: {} for block in table if block.block_id not in old})
        return True

    def tables(self, one: Request) -> Any:
        return self.manager.coordinator.get_blocks(one.request_id)

    def write(self, one: Request, number: int, low: int, high: int) -> None:
        size, table = self.groups[number].block_tokens, self.tables(one)[number]
        for at in range(low, high):
            if not table[at // size].is_null:
                self.content[table[at // size].block_id][at % size] = hash(tuple(one.all_token_ids[: at + 1]))

    def missing(self, one: Request, tables: Any, number: int, low: int, high: int) -> list[Any]:
        size, table = self.groups[number].block_tokens, tables[number]
        return [
            (one.request_id, number, at)
            for at in range(max(low, 0), high)
            if table[at // size].is_null
            or self.content[table[at // size].block_id].get(at % size)
            != hash(tuple(one.all_token_ids[: at + 1]))
        ]

    def check_hit(self, one: Request, tables: Any, local_tokens: int) -> None:
        self.hits += bool(local_tokens)
        for number, group in enumerate(self.groups if local_tokens else ()):
            low = (
                first_attended(group.kind, self.windows[number], local_tokens) if group.attention_span else 0
            )
            self.wrong += self.missing(one, tables, number, low, local_tokens)
            if group.attention_span:
                begin = (
                    max(first_attended(group.kind, group.attention_span, local_tokens), 0)
                    // group.block_tokens
                )
                self.believed += self.missing(one, tables, number, begin * group.block_tokens, local_tokens)


def lived(shape: str, mode: str, passes: int = 120, seeds: int = 4) -> list[Engine]:
    engines = []
    for seed in range(seeds):
        more = dict(MODES[mode])
        engine = Engine(shape, random.Random(seed), more.pop("retention", None), more)
        for _ in range(passes):
            while sum(map(len, (engine.waiting, engine.loading, engine.promoted, engine.running))) < 5:
                engine.arrive()
            engine.scheduling_pass()
        engines.append(engine)
    return engines


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_prefix_cache_gives_is_there(shape: str, mode: str) -> None:
    engines = lived(shape, mode)
    assert sum(engine.hits for engine in engines) > 20
    assert sum(engine.parts for engine in engines) > 5
    for engine in engines:
        assert not engine.wrong
        assert not engine.believed


def test_without_the_watch_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartBlocks, "_evict", lambda *_: False)
    for shape in ("same", "three", "larger", "only"):
        assert any(engine.wrong for engine in lived(shape, "dense")), shape
