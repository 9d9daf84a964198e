"""The bound on what an eviction policy can save, against all policies there are, and against replays."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from benchmarks.eviction.bound import Prices, demand, lowest_bound
from benchmarks.eviction.measure import Excerpt
from kvferry.geometry import GroupKind
from kvferry.planning import attends_to_all, first_attended
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tools.models.store import LayerCache
from kvferry.tools.replay.settings import ReplaySettings, TierSetting
from kvferry.tools.replay.simulation import Simulation
from support.engine_pairs import Turn, conversations, small_model, trace_request
from support.examples import examples
from support.models import attention, state
from support.small_replays import UNIT, prompt

CHUNK, BLOCK = 8, 4
SNAPSHOT = LayerCache(GroupKind.STATE, 0, state().fields[1:])
WINDOW = attention(kind=GroupKind.SLIDING, attention_span=12)
WIDE = LayerCache(GroupKind.FULL, 0, attention(heads=16, k=24, v=24).fields)
MODELS = {
    "full": [attention()],
    "window": [attention(), WINDOW],
    "window only": [WINDOW],
    "state": [attention(), SNAPSHOT],
    "unlike sizes": [WIDE, WINDOW, SNAPSHOT],
}


def of_blocks(name, **steps):
    return small_model(
        MODELS[name], chunk_tokens=CHUNK, block_tokens=BLOCK, step_tokens=1000, retention=0, **steps
    )[0]


def tokens(ends):
    return np.asarray(ends, np.float64)


def far_costs_more(ends):
    return tokens(ends) * (1 + tokens(ends) / 10)


def best_of_all_policies(model, paths, capacity, value):
    """What the best policy saves: it tries every set of chunks that fits after every request.

    Prompts are whole chunks and one token more. Each has a snapshot at its last chunk, and wherever it agrees
    with an earlier prompt.
    """
    best, known = {frozenset(): 0.0}, set()
    for path in paths:
        prefixes = [path[: n + 1] for n in range(len(path))]
        left = set()
        for number, group in enumerate(model.groups):
            for prefix in prefixes:
                if group.kind is not GroupKind.STATE or prefix in known or prefix == path:
                    left.add((number, prefix))
        reached = {}
        for held, saved in best.items():
            ends = [CHUNK * (n + 1) for n in range(len(path)) if usable(model, held, prefixes, n)]
            gain = max([0.0, *map(float, map(value, ends))])
            for kept in subsets(held | left):
                if sum(model.groups[number].chunk_bytes for number, _ in kept) <= capacity:
                    reached[kept] = max(reached.get(kept, 0.0), saved + gain)
        best = reached
        known.update(prefixes)
    return max(best.values())


def usable(model, held, prefixes, last):
    for number, group in enumerate(model.groups):
        first = last
        if attends_to_all(group.kind):
            first = 0
        elif group.kind is not GroupKind.STATE:
            first = max(first_attended(group, CHUNK * (last + 1)), 0) // CHUNK
        if any((number, prefixes[n]) not in held for n in range(first, last + 1)):
            return False
    return True


def subsets(items):
    some = sorted(items)
    return map(frozenset, chain.from_iterable(combinations(some, n) for n in range(len(some) + 1)))


def requests_of(paths):
    """Prompts of whole chunks and one token that no other prompt has, so that tails are never found."""
    for number, path in enumerate(paths):
        prompt = tuple(chain.from_iterable([symbol] * CHUNK for symbol in path))
        yield trace_request(Turn((*prompt, 1000 + number)), CHUNK)


def bound_of(model, requests, capacity, value, steps=200):
    wanted = demand(model, requests, value)
    prices = Prices(wanted, capacity)
    found, at = lowest_bound(prices, wanted.requests, steps=steps)
    assert prices.schedule(at) <= found * (1 + 1e-9)
    return found


def found_by(policy, model, requests, capacity, unit_tokens):
    """The tokens of each request that a replay finds."""
    found = []
    tier = TierSetting(kind="host", capacity_bytes=capacity, shared=False, bytes_per_second=1.0)
    settings = ReplaySettings(tiers=(tier,), policy=policy)
    Simulation(model, settings, unit_tokens, lambda _, hit: found.append(hit.found)).run(requests)
    return found


PATHS = st.lists(st.sampled_from(["a", "ab", "abc", "abd", "b", "ba"]), min_size=1, max_size=5)


@pytest.mark.parametrize("name", MODELS)
@given(paths=PATHS, share=st.floats(0, 1), value=st.sampled_from([tokens, far_costs_more]))
@examples(15)
def test_no_eviction_policy_saves_more_than_the_bound(name, paths, share, value):
    model = of_blocks(name)
    prefixes = {path[: n + 1] for path in paths for n in range(len(path))}
    assume(len(prefixes) * len(model.groups) <= 9)
    paths = [tuple(map(ord, path)) for path in paths]
    capacity = int(share * len(prefixes) * sum(group.chunk_bytes for group in model.groups))
    best = best_of_all_policies(model, paths, capacity, value)
    assert bound_of(model, list(requests_of(paths)), capacity, value) >= best * (1 - 1e-9)


@given(paths=PATHS, chunks=st.integers(0, 4))
@examples(30)
def test_bound_is_what_the_best_policy_saves_if_all_chunks_are_alike(paths, chunks):
    model, paths = of_blocks("full"), [tuple(map(ord, path)) for path in paths]
    capacity = chunks * model.groups[0].chunk_bytes
    best = best_of_all_policies(model, paths, capacity, tokens)
    found = bound_of(model, list(requests_of(paths)), capacity, tokens, steps=3000)
    assert found == pytest.approx(best, rel=0.02, abs=0.02)


def test_a_chunk_is_no_use_without_those_before_it():
    """A bound for each chunk by itself would let the far, dear chunk be kept alone."""
    model = of_blocks("full")
    paths = [(1, 2), (1, 2)]
    one = model.groups[0].chunk_bytes
    found = [bound_of(model, list(requests_of(paths)), n * one, far_costs_more, steps=3000) for n in (1, 2)]
    assert found[1] == pytest.approx(far_costs_more(16))
    assert found[0] == pytest.approx(max(far_costs_more(8), far_costs_more(16) / 2), rel=0.01)


@pytest.mark.parametrize("name", MODELS)
@given(
    turns=conversations(most_tokens=96, requests=16),
    policy=st.sampled_from(sorted(EVICTION_POLICIES)),
    host=st.integers(0, 1 << 17),
    first=st.sampled_from([0, CHUNK, 20]),
)
@examples(8)
def test_no_replay_saves_more_than_the_bound(name, turns, policy, host, first):
    model = of_blocks(name, first_snapshot_tokens=first)
    requests = [trace_request(turn, 1) for turn in turns]
    saved = far_costs_more(found_by(policy, model, requests, host, 1)).sum()
    assert saved <= bound_of(model, requests, host, far_costs_more, steps=30) * (1 + 1e-9)


def test_a_replay_saves_more_than_the_bound_of_a_smaller_tier():
    model = of_blocks("window")
    requests = list(requests_of([(1, 2, 3), (1, 2, 3)] * 4))
    size = 4 * sum(group.chunk_bytes for group in model.groups)  # the last token, too
    assert sum(found_by("lru", model, requests, size, CHUNK)) == 7 * 24
    assert bound_of(model, requests, size, tokens) == pytest.approx(7 * 24)
    assert bound_of(model, requests, size // 4, tokens) < 6 * 24


@pytest.mark.parametrize(
    ("excerpt", "expected"),
    [
        (Excerpt(), [1, 5, 2, 3]),
        (Excerpt(skip=1, count=2), [5, 2]),
        (Excerpt(concurrency=1), [1, 2, 3, 5]),
    ],
)
def test_an_excerpt_has_the_turns_of_all_sessions_in_the_order_in_which_they_arrive(excerpt, expected):
    class Sessions(list):
        unit_tokens = UNIT

    turns = [replace(prompt(UNIT, number), delay=10.0) for number in (2, 3)]
    sessions = Sessions(
        [replace(prompt(UNIT, 1), arrival=0.0, later=iter(turns)), replace(prompt(UNIT, 5), arrival=1.0)]
    )
    names = {prompt(UNIT, number).prefix_ids[0]: number for number in range(9)}
    found = excerpt.of(sessions)
    assert [names[request.prefix_ids[0]] for request in found] == expected
    assert not any(list(request.later) for request in found)
