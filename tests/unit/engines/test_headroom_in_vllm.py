"""Loads that `Headroom` lets begin, over vLLM's cache manager: requests with blocks go on in turn."""

from __future__ import annotations

from hypothesis import given, strategies as st

from kvferry.connector.blocks import Headroom
from support.examples import examples
from support.vllm_cache import STEP, VllmCache, chunked, full, window

LONGEST = 400
FULL = full()
REACHING = [window(7), window(20), window(32), chunked(48)]
LOADS = st.tuples(st.integers(1, 300), st.sampled_from([0, 0, 1, 30, 64, 100]))
"""Tokens that are loaded, and tokens of the prompt after them."""


class LoadingCache(VllmCache):
    """Requests that wait with blocks, in vLLM's order and by its rules."""

    def __init__(self, specs, blocks, *, cautious=True) -> None:
        super().__init__(specs, blocks, longest=LONGEST, caching=False)
        self.free = self.pool.get_num_free_blocks
        self.headroom = Headroom.of(self.groups, STEP, self.pool)
        self.cautious, self.waiting = cautious, []

    def load(self, name, total, tokens) -> bool:
        """Begin a load if it may; return whether it began."""
        one = self.request(name, range(tokens))
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
        """Compute the first request alone to its end; return whether it had room."""
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


@examples(100)
@given(
    windows=st.lists(st.sampled_from(REACHING), min_size=1, max_size=5),
    blocks=st.integers(80, 120),
    loads=st.lists(LOADS, min_size=10, max_size=30),
    running=st.integers(0, 79),
)
def test_requests_that_wait_with_blocks_go_on_after_any_loads(windows, blocks, loads, running) -> None:
    # Requests that run meanwhile free their blocks sooner or later.
    cache = LoadingCache([FULL, *windows], blocks)
    free, pool = cache.free(), cache.pool
    held = pool.get_new_blocks(running)
    for number, (total, after) in enumerate(loads):
        cache.load(f"r{number}", total, total + after)
    pool.free_blocks(held)
    while cache.waiting:
        assert cache.go_on()
    assert cache.free() == free
    assert len(cache.headroom) == 0


def test_headroom_counts_as_many_blocks_for_a_load_as_vllm_allocates() -> None:
    for total in range(1, LONGEST + 1):
        cache = LoadingCache([FULL, *REACHING], 300)
        before = cache.free()
        assert cache.load("a", total, total)
        taken = before - cache.free()
        cache.pool.get_new_blocks(cache.free() - taken)
        assert cache.headroom.fits("b", total, total)
        cache.pool.get_new_blocks(1)
        assert not cache.headroom.fits("b", total, total)


def test_vllm_alone_begins_loads_of_which_none_goes_on() -> None:
    """When this fails, vLLM counts windows as they are, and `Headroom` is not needed any more."""
    cache = LoadingCache([FULL, *REACHING[:1] * 5], 100, cautious=False)
    assert cache.load("large", 256, 320)
    while cache.load(f"whole {len(cache.waiting)}", 64, 64):
        pass
    assert not cache.go_on()
