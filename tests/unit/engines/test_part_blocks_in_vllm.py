"""Blocks that loads fill in part are never found by vLLM's prefix cache. Over vLLM's own cache manager."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.request import Request

from kvferry.connector.blocks import PartBlocks
from kvferry.geometry import Attention, Group, GroupKind
from kvferry.planning.select import LoadSpan, first_attended, needed_tokens
from support.vllm_cache import STEP, VllmCache, full, window

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
"""Arguments of vLLM's manager: blocks that its prefix cache keeps, and how much of a window besides."""
LONGEST, BLOCKS = 380, 120


class PartlyLoadedCache(VllmCache):
    """Requests over a cache manager whose blocks remember their content.

    Attributes:
        wrong: (request, group, token) that a request attends to and whose KV is missing from a block.
        believed: the same from the first block on in which the window of a prefix begins.
        parts: number of loads that filled a block in part.
        hits: number of requests that found a prefix.
    """

    def __init__(self, shape: str, mode: str, seed: int, *, watched: bool = True) -> None:
        self.draw, self.watched = random.Random(seed), watched
        more = dict(MODES[mode])
        retention = more.pop("retention", None)
        extra = max(0, more.get("num_prefill_lookahead", 0) - 1)
        groups, sizes = SHAPES[shape], [block for _, block, _ in SHAPES[shape]]
        common, unit = math.lcm(*sizes), math.gcd(*sizes)
        super().__init__(
            [
                full(size) if kind is F else window(span, size, extra_retained_tokens=extra)
                for kind, size, span in groups
            ],
            BLOCKS,
            longest=400,
            unit=unit,
            common=common,
            in_flight=STEP,
            retention=retention and retention * common,
            **more,
        )
        self.windows = [attention_span for _, _, attention_span in groups]
        self.groups = tuple(
            Group(kind, size, attention_span + extra * (kind is S), ())
            for kind, size, attention_span in groups
        )
        self.wrong: list[Any] = []
        self.believed: list[Any] = []
        self.parts = self.hits = 0
        self.watch = PartBlocks(self.groups, self.pool)
        self.texts = [[self.draw.randrange(3) + 3 * n for n in range(100)] * 4 for _ in range(2)]
        self.content: dict[int, dict[int, int]] = {}
        self.waiting: list[Request] = []
        self.loading: list[tuple[Request, LoadSpan, list[int]]] = []
        self.promoted: list[Request] = []
        self.running: list[Request] = []
        self.computed: list[tuple[Request, int]] = []
        self.count = 0

    def arrive(self) -> None:
        self.count += 1
        same = self.draw.randrange(1, 260)
        own = [1000 * self.count + n for n in range(self.draw.choice([0, 1, 2, 3, 20]))]
        tokens = self.draw.choice(self.texts)[:same] + own
        self.waiting.append(self.request(f"r{self.count}", tokens, answer=100))

    def scheduling_pass(self) -> None:
        """Schedule in vLLM's order: running requests, then waiting ones. Some that could go on do not."""
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
            if not (self.watched and self.watch.evict()):
                self.admit(one, blocks, local_tokens)
        if self.watched:
            self.watch.end_pass()
        self.count_computed()

    def count_computed(self) -> None:
        """Count the tokens of a pass as computed. vLLM does so after the connector has seen its end."""
        for one, total in self.computed:
            one.num_computed_tokens = total
            if total == one.num_tokens:
                one.append_output_token_ids(self.texts[0][total])
        self.computed.clear()

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
        tables = tuple([block.block_id for block in table] for table in self.blocks(one))
        self.watch.begin(one, tables, span, alignments)
        self.parts += self.watch.masked_tables(one.request_id, tables) != tables
        one.num_computed_tokens = span.total
        self.loading.append((one, span, alignments))

    def alignment_tokens(self, block: int, local_tokens: int) -> int:
        return self.draw.choice([n for n in range(1, block + 1) if block % n == 0 and local_tokens % n == 0])

    def lets_go(self, total: int) -> bool:
        """Whether vLLM would free blocks that the last token attends to, so that this token is not loaded."""
        return any(
            first_attended(one, total - 1) // one.block_tokens
            != first_attended(one, total) // one.block_tokens
            for one in self.groups
            if one.attention_span and total >= one.attention_span
        )

    def promote(self, one: Request, span: LoadSpan, alignments: list[int]) -> None:
        for number, (group, alignment_tokens) in enumerate(zip(self.groups, alignments, strict=True)):
            low, high = needed_tokens(group, span)
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
        if self.watched:
            self.watch.on_resumed(one.request_id)
        for number, group in enumerate(self.groups):
            self.write(one, number, first, first + count)
            low = (
                first_attended(Attention(group.kind, self.windows[number]), first)
                if group.attention_span
                else 0
            )
            self.wrong += self.missing(one, self.blocks(one), number, low, first + count)
        self.computed.append((one, first + count))
        return True

    def allocate(self, one: Request, *args: Any, **more: Any) -> bool:
        found = more.get("new_computed_blocks")
        old = {block.block_id for table in self.blocks(one) for block in table}
        old |= {block.block_id for table in (found.blocks if found else ()) for block in table}
        if self.manager.allocate_slots(one, *args, **more) is None:
            return False
        for table in self.blocks(one):
            self.content.update({block.block_id: {} for block in table if block.block_id not in old})
        return True

    def blocks(self, one: Request) -> Any:
        return self.manager.coordinator.get_blocks(one.request_id)

    def write(self, one: Request, number: int, low: int, high: int) -> None:
        size, table = self.groups[number].block_tokens, self.blocks(one)[number]
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
                first_attended(Attention(group.kind, self.windows[number]), local_tokens)
                if group.attention_span
                else 0
            )
            self.wrong += self.missing(one, tables, number, low, local_tokens)
            if group.attention_span:
                begin = max(first_attended(group, local_tokens), 0) // group.block_tokens
                self.believed += self.missing(one, tables, number, begin * group.block_tokens, local_tokens)


def after_passes(shape: str, mode: str, *, seeds: int, watched: bool = True) -> Iterator[PartlyLoadedCache]:
    for seed in range(seeds):
        cache = PartlyLoadedCache(shape, mode, seed, watched=watched)
        for _ in range(120):
            while sum(map(len, (cache.waiting, cache.loading, cache.promoted, cache.running))) < 5:
                cache.arrive()
            cache.scheduling_pass()
        yield cache


@pytest.mark.parametrize("seeds", [1, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_found_prefixes_have_all_kv_that_is_attended_to(shape: str, mode: str, seeds: int) -> None:
    hits = parts = 0
    for cache in after_passes(shape, mode, seeds=seeds):
        assert not cache.wrong
        assert not cache.believed
        hits += cache.hits
        parts += cache.parts
    assert hits > 5 * seeds
    assert parts >= seeds


@pytest.mark.parametrize(
    "shape", ["same", *(pytest.param(shape, marks=pytest.mark.long) for shape in ("three", "larger", "only"))]
)
def test_found_prefixes_lack_kv_if_partly_filled_blocks_are_not_evicted(shape: str) -> None:
    assert any(cache.wrong for cache in after_passes(shape, "dense", seeds=8, watched=False))
