from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.trace.workload import Workload

CHAT = Workload(
    users=20,
    requests_per_second=4.0,
    shared_prompt_tokens=100,
    turns=4,
    prompt_tokens=200,
    output_tokens=80,
    hours=500 / 3600,
    seed=3,
)


@pytest.fixture(scope="module")
def requests():
    return list(CHAT.requests())


@pytest.fixture(scope="module")
def conversations(requests):
    found = defaultdict(list)
    for request in requests:
        found[request.session].append(request)
    return list(found.values())


def shared_units(one, other):
    pairs = zip(one.prefix_ids.tolist(), other.prefix_ids.tolist(), strict=False)
    return sum(first == second for first, second in pairs)


def test_requests_arrive_in_order_at_the_given_rate_for_the_given_time(requests):
    arrivals = np.array([each.arrival for each in requests])
    assert (np.diff(arrivals) >= 0).all()
    assert arrivals[0] >= 0
    assert 490 < arrivals[-1] < 500
    assert len(requests) == pytest.approx(2000, rel=0.1)
    assert np.diff(arrivals).std() == pytest.approx(0.25, rel=0.1)


def test_a_users_gaps_are_exponential(requests):
    by_user = defaultdict(list)
    for request in requests:
        by_user[request.session.partition("-")[0]].append(request.arrival)
    assert len(by_user) == 20
    gaps = np.concatenate([np.diff(each) for each in by_user.values()])
    assert gaps.mean() == pytest.approx(5.0, rel=0.1)
    assert gaps.std() == pytest.approx(5.0, rel=0.1)


def test_each_turn_continues_the_conversation(conversations):
    for conversation in conversations:
        for before, after in pairwise(conversation):
            known = before.prompt_tokens + before.output_tokens
            assert after.prompt_tokens > known
            assert len(before.prefix_ids) == known // 16
            assert shared_units(before, after) == known // 16


def test_conversations_have_the_given_number_of_turns_and_interleave(conversations):
    lengths = [len(each) for each in conversations]
    assert max(lengths) == 4
    assert sum(length < 4 for length in lengths) <= 20  # those that the end of the trace cuts
    assert any(one[0].arrival < other[0].arrival < one[-1].arrival for one, other in pairwise(conversations))


def test_conversations_have_the_shared_prompt_in_common_and_nothing_else(conversations):
    whole = 100 // 16
    for one, other in pairwise(conversations):
        assert shared_units(one[-1], other[-1]) == whole
        assert not set(one[-1].prefix_ids[whole:].tolist()) & set(other[-1].prefix_ids.tolist())


def test_conversations_without_a_shared_prompt_share_no_prefix():
    requests = list(replace(CHAT, shared_prompt_tokens=0, turns=1).requests())
    found = [one for each in requests for one in each.prefix_ids.tolist()]
    assert len(set(found)) == len(found)


def test_lengths_are_log_normal_with_the_given_means():
    long = replace(CHAT, turns=1, shared_prompt_tokens=0, requests_per_second=40.0)
    requests = list(long.requests())
    for mean, lengths in (
        (200, [each.prompt_tokens for each in requests]),
        (80, [each.output_tokens for each in requests]),
    ):
        assert np.mean(lengths) == pytest.approx(mean, rel=0.03)
        assert np.median(lengths) == pytest.approx(0.61 * mean, rel=0.03)
        assert np.quantile(lengths, 0.95) == pytest.approx(3.14 * mean, rel=0.05)


def test_equal_workloads_give_equal_requests_and_other_seeds_others(requests):
    def facts(requests):
        return [
            (each.arrival, each.prompt_tokens, each.prefix_ids.tolist(), each.prompt_id)
            for each in islice(requests, 50)
        ]

    assert facts(CHAT.requests()) == facts(requests)
    other = facts(replace(CHAT, seed=4).requests())
    assert not {one for each in other for one in each[2]} & {
        one for each in facts(requests) for one in each[2]
    }


def test_requests_are_generated_as_they_are_consumed():
    endless = replace(CHAT, hours=2e5)
    assert len(list(islice(endless.requests(), 10))) == 10


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"users": 0}, "users is 0; give a number from 1 to 10,000,000"),
        ({"requests_per_second": float("nan")}, "requests_per_second is nan; give a number from 1e-06 to"),
        ({"shared_prompt_tokens": -1}, "shared_prompt_tokens is -1; give"),
        ({"turns": 0}, "turns is 0; give"),
        ({"output_tokens": 0}, "output_tokens is 0; give"),
        (
            {"turns": 100_000},
            "100000 turns take 28,000,100 tokens, and a conversation has at most 16,777,216; lower",
        ),
    ],
)
def test_numbers_out_of_bounds_are_refused(change, problem):
    with pytest.raises(ConfigError) as caught:
        replace(CHAT, **change)
    assert f"workload: {problem}" in str(caught.value)
