"""Loads that `Headroom` lets begin, over vLLM's cache manager: whoever waits with blocks goes on in turn."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvferry.connector.headroom import Headroom
from kvferry.engines.vllm.info import cache_group

BLOCK, STEP, LONGEST = 16, 64, 400
LIKE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**LIKE)
REACHING = [
    *(SlidingWindowSpec(sliding_window=attention_span, **LIKE) for attention_span in (7, 20, 32)),
    ChunkedLocalAttentionSpec(attention_chunk_size=48, **LIKE),
]
LOADS = st.tuples(st.integers(1, 300), st.sampled_from([0, 0, 1, 30, 64, 100]))
"""Tokens that are loaded, and that come after them."""


class Engine:
    """Requests that wait with blocks, in vLLM's order and by its rules."""

    def __init__(self, specs, blocks, *, cautious=True) -> None:
        groups = [KVCacheGroupSpec([f"layer {n}"], spec) for n, spec in enumerate(specs)]
        config = KVCacheConfig(blocks, [], groups)
        self.manager = KVCacheManager(
            config, LONGEST, BLOCK, BLOCK, max_in_flight_tokens=STEP, enable_caching=False
        )
        self.free = self.manager.block_pool.get_num_free_blocks
        self.headroom = Headroom.of(tuple(map(cache_group, groups)), STEP, self.manager.block_pool)
        self.cautious, self.waiting = cautious, []

    def load(self, name, total, tokens) -> bool:
        """Begin one, if that may be."""
        one = Request(name, list(range(tokens)), SamplingParams(max_tokens=1), None)
        if self.cautious and not self.headroom.fits(name, total, tokens):
            return False
        begun = self.manager.allocate_slots(
            one,
            0,
            num_external_computed_tokens=total,
            delay_cache_blocks=True,
            full_sequence_must_fit=True,
            reserved_blocks=sum(map(self.reserved, self.waiting)),
        )
        if begun is None:
            return False
        one.num_computed_tokens = total
        self.headroom.on_load_begun(name, total, tokens)
        self.waiting.append(one)
        return True

    def reserved(self, one) -> int:
        """As the scheduler's `_request_remaining_blocks` has it."""
        return self.manager.coordinator.get_num_blocks_to_allocate(
            request_id=one.request_id,
            num_tokens=one.num_tokens,
            new_computed_blocks=self.manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=one.num_computed_tokens,
            num_local_computed_tokens=one.num_computed_tokens,
            num_tokens_main_model=one.num_tokens,
            apply_admission_cap=True,
            prefill_end=one.num_tokens,
        )

    def go_on(self) -> bool:
        """The first computes to its end, by itself, and ends; whether it could."""
        one = self.waiting.pop(0)
        one.num_computed_tokens = min(one.num_computed_tokens, one.num_tokens - 1)
        while (left := one.num_tokens - one.num_computed_tokens) > 0:
            count = min(left, STEP)
            if self.manager.allocate_slots(one, count, full_sequence_must_fit=True) is None:
                return False
            self.headroom.on_resumed({one.request_id})
            one.num_computed_tokens += count
        self.manager.free(one)
        return True


@settings(max_examples=100)
@given(
    windows=st.lists(st.sampled_from(REACHING), min_size=1, max_size=5),
    blocks=st.integers(80, 120),
    loads=st.lists(LOADS, min_size=10, max_size=30),
    running=st.integers(0, 79),
)
def test_whoever_waits_with_blocks_goes_on_whatever_else_was_begun(windows, blocks, loads, running) -> None:
    """Of what runs meanwhile, blocks come free sooner or later."""
    engine = Engine([FULL, *windows], blocks)
    free, pool = engine.free(), engine.manager.block_pool
    held = pool.get_new_blocks(running)
    for number, (total, after) in enumerate(loads):
        engine.load(f"r{number}", total, total + after)
    pool.free_blocks(held)
    while engine.waiting:
        assert engine.go_on()
    assert engine.free() == free
    assert len(engine.headroom) == 0


def test_a_load_takes_no_more_blocks_than_it_is_taken_for() -> None:
    for total in range(1, LONGEST + 1):
        engine = Engine([FULL, *REACHING], 300)
        before = engine.free()
        assert engine.load("a", total, LONGEST)
        assert before - engine.free() == engine.headroom._blocks_to_allocate(total)


def test_left_to_itself_vllm_begins_loads_of_which_none_goes_on() -> None:
    """When this fails, vLLM counts windows as they are, and `Headroom` is not needed any more."""
    engine = Engine([FULL, *REACHING[:1] * 5], 100, cautious=False)
    assert engine.load("large", 256, 320)
    while engine.load(f"whole {len(engine.waiting)}", 64, 64):
        pass
    assert not engine.go_on()
