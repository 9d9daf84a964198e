"""The simulation against the code that serves: requests find the same tokens, tiers keep the same chunks.

Copies, reads and writes of the engine that serves end before its next step begins, as in the simulation.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, strategies as st

from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import derive as length
from kvferry.keys.tenant import tenant_of
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tools.models.store import LayerCache
from kvferry.tools.replay.settings import AdmissionSetting
from support.engine_pairs import Both, Turn, both, conversations, hinted, small_model
from support.examples import examples
from support.models import attention, state

CHUNK, BLOCK, LONGEST = 8, 4, 96
PAGE = 4096
"""Bytes of a chunk of each small group."""
SNAPSHOT = LayerCache(GroupKind.STATE, 0, state().fields[1:])
WINDOW, SHORT, LOCAL = (
    attention(kind=kind, attention_span=span)
    for kind, span in ((GroupKind.SLIDING, 12), (GroupKind.SLIDING, 6), (GroupKind.CHUNKED, 16))
)
MODELS = {
    "full": [attention()],
    "window": [attention(), WINDOW],
    "short window": [attention(), SHORT],
    "chunked": [LOCAL, attention()],
    "state": [attention(), SNAPSHOT],
    "window and state": [attention(), WINDOW, SNAPSHOT],
}
SLOW = (
    {},
    {"file": 1 << 40},
    {"file": 20 * 2 * PAGE},
    {"file": 1 << 40, "object": 1 << 40},
    {"file": 20 * 2 * PAGE, "object": 1 << 40},
)
FLEETS = (
    {"fleet": 0},
    {"fleet": 0, "file": 1 << 40},
    {"file": 20 * 2 * PAGE, "fleet": 0},
    {"fleet": 0, "file": 20 * 2 * PAGE, "object": 1 << 40},
)
POLICIES = st.sampled_from(sorted(EVICTION_POLICIES))
STEPS = st.fixed_dictionaries(
    {
        "step_tokens": st.sampled_from([1000, 1000, 40, 24, 16]),
        "retention": st.sampled_from([0, None, 16]),
        "snapshot_tokens": st.sampled_from([CHUNK, CHUNK, 2 * CHUNK, 4 * CHUNK]),
        "first_snapshot_tokens": st.sampled_from([0, CHUNK, 2 * CHUNK, 20]),
    }
)
LIMITS = st.sampled_from([1.0, 0.5])
UNITS = st.sampled_from([1, 2, 4, CHUNK])


@pytest.fixture(autouse=True)
def _alignment_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length, "WINDOW_ALIGNMENT_TOKENS", BLOCK)


def of_blocks(name: str, steps: dict[str, int | None]):
    return small_model(MODELS[name], chunk_tokens=CHUNK, block_tokens=BLOCK, **steps)


def check(pair: Both, turns: list[Turn], engines: list[int] | None = None) -> None:
    for number, turn in enumerate(turns):
        simulated, real = pair.serve(turn, engines[number % len(engines)] if engines else 0)
        assert simulated == real, turn
        for mine, theirs in pair.held():
            assert mine == theirs


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data(), steps=STEPS, policy=POLICIES, slow=st.sampled_from(SLOW), unit=UNITS)
@examples(8)
def test_replay_finds_and_stores_the_same_chunks_as_an_engine(name, data, steps, policy, slow, unit):
    model, rank = of_blocks(name, steps)
    # A slow tier accepts only so many writes at a time. With other policies than lru, that decides which
    # chunks are evicted if a request does not fit into host memory.
    least = 1 if policy == "lru" or not slow else (LONGEST // CHUNK + 2) * len(model.groups)
    host = data.draw(st.integers(least, least + 20 * len(model.groups))) * PAGE
    turns = data.draw(conversations(most_tokens=LONGEST, block_tokens=data.draw(st.sampled_from([0, BLOCK]))))
    with both(model, rank, host_bytes=host, policy=policy, slow=slow, unit_tokens=unit) as pair:
        check(pair, turns)


@pytest.mark.parametrize("name", MODELS)
@given(turns=conversations(most_tokens=3 * LONGEST, block_tokens=BLOCK), steps=STEPS, policy=POLICIES)
@examples(4)
def test_requests_of_many_chunks_are_stored_in_the_order_of_an_engine(name, turns, steps, policy):
    model, rank = of_blocks(name, steps)
    with both(model, rank, host_bytes=20 * PAGE, policy=policy, slow={}) as pair:
        check(pair, turns)


@pytest.mark.parametrize("name", ["window", "short window", "chunked"])
@given(
    turns=conversations(most_tokens=2 * LONGEST, block_tokens=BLOCK, requests=16),
    host=st.integers(12, 60),
    steps=STEPS,
    policy=POLICIES,
)
@examples(8)
def test_windows_that_no_likely_prefix_needs_leave_host_memory_first_in_both(
    name, turns, host, steps, policy
):
    model, rank = of_blocks(name, steps)
    with both(model, rank, host_bytes=host * PAGE, policy=policy, slow={}) as pair:
        check(pair, turns)


@pytest.mark.parametrize("name", ["window", "chunked"])
@given(
    turns=conversations(most_tokens=LONGEST, requests=16),
    file=st.integers(10, 40),
    steps=STEPS,
    host=st.integers((LONGEST // CHUNK + 2) * 2, 40),
)
@examples(8)
def test_windows_that_no_likely_prefix_needs_leave_files_first_in_both(name, turns, file, steps, host):
    model, rank = of_blocks(name, steps)
    slow = {"file": file * 2 * PAGE}
    with both(model, rank, host_bytes=host * PAGE, policy="lru", slow=slow) as pair:
        check(pair, turns)


@pytest.mark.parametrize("name", MODELS)
@given(
    turns=conversations(most_tokens=LONGEST, block_tokens=BLOCK, requests=16),
    steps=STEPS,
    slow=st.sampled_from(SLOW[1:]),
    room=st.integers(0, 20),
    admission=st.builds(AdmissionSetting, st.integers(1, 3), st.sampled_from([0, 0, 20, 60]), st.none()),
)
@examples(8)
def test_the_same_chunks_are_admitted_to_slow_tiers_in_both(name, turns, steps, slow, room, admission):
    model, rank = of_blocks(name, steps)
    host = (LONGEST // CHUNK + 2 + room) * len(model.groups) * PAGE
    with both(model, rank, host_bytes=host, slow=slow, admission=admission) as pair:
        check(pair, turns)
        for at, queue in enumerate(pair.served[0].queues, 1):
            simulated = sum(counts.declined for counts in pair.simulation.tiers[at][0].counts)
            assert simulated == queue.filter.declined.total()


@given(turns=conversations(most_tokens=LONGEST), steps=STEPS, slow=st.sampled_from(SLOW[:4:3]))
@examples(5)
def test_chunks_of_several_sizes_are_kept_alike_where_host_memory_is_large(turns, steps, slow):
    wide = LayerCache(GroupKind.FULL, 0, attention(heads=16, k=24, v=24).fields)
    model, rank = small_model([wide, WINDOW, state()], chunk_tokens=CHUNK, block_tokens=BLOCK, **steps)
    assert len({group.chunk_bytes for group in model.groups}) == 3
    with both(model, rank, host_bytes=1 << 23, policy="lru", slow=slow) as pair:
        check(pair, turns)


def test_a_chunk_that_a_found_prompt_ends_in_is_computed_anew():
    model, rank = of_blocks("full", {"step_tokens": 1000, "snapshot_tokens": CHUNK, "retention": 0})
    first, other = Turn(tuple(range(7)), tuple(range(100, 109))), Turn(tuple(range(200, 224)))
    with both(model, rank, host_bytes=3 * PAGE, policy="lru", slow={"file": 1 << 40}) as pair:
        check(pair, [first, other, first])


@pytest.mark.parametrize("name", MODELS)
@given(
    turns=conversations(most_tokens=LONGEST, block_tokens=BLOCK, requests=16),
    engines=st.lists(st.integers(0, 2), min_size=1, max_size=16),
    steps=STEPS,
    slow=st.sampled_from(FLEETS),
    room=st.integers(0, 6),
)
@examples(8)
def test_engines_read_the_same_chunks_of_each_others_host_memory_in_both(
    name, turns, engines, steps, slow, room
):
    # With other policies than lru, rare examples evict a different chunk. With lru, none was found.
    model, rank = of_blocks(name, steps)
    host = (LONGEST // CHUNK + 2 + room) * len(model.groups) * PAGE
    with both(model, rank, host_bytes=host, slow=slow, engines=3) as pair:
        check(pair, turns, engines)


def check_hinted(pair: Both, turns: list[Turn]) -> None:
    for turn in turns:
        check(pair, [turn])
        for mine, theirs in pair.retained():
            assert mine == theirs, turn


@pytest.mark.parametrize("name", MODELS)
@given(
    data=st.data(),
    steps=STEPS,
    room=st.integers(0, 20),
    share=st.sampled_from([0.0, 0.1, 0.25]),
    seconds=st.sampled_from([2.0, 3600.0]),
)
@examples(8)
def test_hints_retain_and_evict_the_same_chunks_in_both(name, data, steps, room, share, seconds):
    model, rank = of_blocks(name, steps)
    turns = data.draw(conversations(most_tokens=LONGEST, requests=12).flatmap(hinted))
    host = (LONGEST // CHUNK + 2 + room) * len(model.groups) * PAGE
    slow = data.draw(st.sampled_from(SLOW))
    hints = {"hint_share": share, "hint_seconds": seconds}
    with both(model, rank, host_bytes=host, slow=slow, **hints) as pair:
        check_hinted(pair, turns)


def by_weight(limit: float) -> dict[str, dict[str, object]]:
    heavy = {"salt_digest": tenant_of("a", None).hex(), "weight": 3}
    return {"heavy": heavy, "others": {"weight": 1, "limit": limit}}


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
@given(
    data=st.data(), name=st.sampled_from(sorted(MODELS)), steps=STEPS, room=st.integers(0, 20), limit=LIMITS
)
@examples(8)
def test_tenants_by_weight_keep_and_retain_the_same_chunks_in_both(policy, data, name, steps, room, limit):
    model, rank = of_blocks(name, steps)
    turns = data.draw(conversations(most_tokens=LONGEST, requests=12).flatmap(hinted))
    host = (LONGEST // CHUNK + 2 + room) * len(model.groups) * PAGE
    more = {"tenants": by_weight(limit), "hint_share": 0.25}
    # The storage of these engines knows no tenants, so it must have room for all.
    slow = data.draw(st.sampled_from(SLOW[:4:3]))
    with both(model, rank, host_bytes=host, policy=policy, slow=slow, **more) as pair:
        check_hinted(pair, turns)


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data(), steps=STEPS, room=st.integers(0, 20), file=st.integers(8, 40), limit=LIMITS)
@examples(5)
def test_tenants_by_weight_keep_the_same_files_in_both(name, data, steps, room, file, limit):
    model, rank = of_blocks(name, steps)
    tenants = st.lists(st.sampled_from(["", "a", "b"]), min_size=16, max_size=16)
    turns = [
        replace(turn, tenant=tenant)
        for turn, tenant in zip(
            data.draw(conversations(most_tokens=LONGEST, requests=16)), data.draw(tenants), strict=False
        )
    ]
    host = (LONGEST // CHUNK + 2 + room) * len(model.groups) * PAGE
    with (
        TemporaryDirectory() as files,
        both(
            model,
            rank,
            host_bytes=host,
            slow={"file": file * 2 * PAGE},
            tenants=by_weight(limit),
            files=Path(files),
        ) as pair,
    ):
        check(pair, turns)


def test_a_prefetch_finds_no_tail_of_a_prompt_with_an_answer_in_both():
    model, rank = of_blocks("full", {"step_tokens": 1000})
    first, later = Turn((7,), (8, 9), session="s"), Turn((20,), session="s", at=1.0, prefetched=True)
    with both(model, rank, host_bytes=20 * PAGE, slow={}, hint_share=0.25) as pair:
        check_hinted(pair, [first, later])


def test_engine_asks_others_for_what_only_a_slower_tier_of_its_own_has():
    model, rank = of_blocks("full", {"step_tokens": 1000})
    first, other = Turn(tuple(range(24))), Turn(tuple(range(100, 124)))
    slow = {"fleet": 0, "file": 1 << 40}
    with both(model, rank, host_bytes=3 * PAGE, slow=slow, engines=2) as pair:
        check(pair, [first, other, first], [1, 1, 0])
        # Engine 1 has it in a file, and engine 0 in host memory.
        assert pair.serve(first, 1) == ((0, 0, 24, 0), (0, 0, 24, 0))
        assert pair.serve(first, 0) == ((0, 24, 0, 0), (0, 24, 0, 0))
