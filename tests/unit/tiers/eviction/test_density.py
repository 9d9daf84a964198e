"""Hit density: what it learns, what it evicts, and that its counts stay right."""

from __future__ import annotations

import random
from itertools import count

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.tiers.eviction.density import HitDensity
from kvferry.tiers.eviction.policies import ARC, LRU, S3FIFO
from kvferry.tiers.eviction.return_times import ReturnTimes, age_numbers
from support.examples import examples

KEYS = [bytes([n]) for n in range(24)]
KEY_LISTS = st.lists(st.sampled_from(KEYS), unique=True)


class Contract(RuleBasedStateMachine):
    """Any calls, in any order. Only the keys and their sizes are modelled, not which one is evicted."""

    @initialize(capacity=st.integers(20, 120))
    def make(self, capacity):
        self.policy = HitDensity(capacity)
        self.sizes, self.pinned, self.cold = {}, set(), []

    def evicted(self, keys):
        """Cold keys go first, in their order, and pinned keys never."""
        loose = [key for key in self.cold if key not in self.pinned]
        assert keys[: len(loose)] == loose[: len(keys)]
        for key in keys:
            assert key not in self.pinned
            self.forget(key)

    def forget(self, key):
        del self.sizes[key]
        self.pinned.discard(key)
        if key in self.cold:
            self.cold.remove(key)

    def warm_up(self, keys):
        self.cold = [key for key in self.cold if key not in keys]

    @rule(keys=KEY_LISTS, size=st.integers(1, 9), cold=st.booleans(), at_once=st.booleans())
    def admit(self, keys, size, cold, at_once):
        keys = [key for key in keys if key not in self.sizes]
        free = self.policy.capacity_bytes - sum(self.sizes.values())
        self.evicted(self.policy.evict_bytes(size * len(keys) - free) if size * len(keys) > free else [])
        if size * len(keys) > self.policy.capacity_bytes - sum(self.sizes.values()):
            return
        if at_once:
            self.policy.admit_all(keys, size, cold=cold)
        else:
            for key in keys:
                self.policy.admit(key, size, cold=cold)
        self.sizes.update(dict.fromkeys(keys, size))
        self.cold += keys if cold else []

    @rule(keys=KEY_LISTS, tokens=st.integers(0, 1 << 20))
    def mark_used(self, keys, tokens):
        self.policy.mark_used(keys, tokens)
        self.warm_up(keys)

    @rule(keys=KEY_LISTS)
    def touch_all(self, keys):
        known = [key for key in keys if key in self.sizes]
        self.policy.touch_all(known)
        self.warm_up(known)

    @rule(keys=KEY_LISTS)
    def make_cold(self, keys):
        self.policy.make_cold(keys)
        self.cold += [key for key in keys if key in self.sizes and key not in self.cold]

    @rule(keys=KEY_LISTS)
    def pin(self, keys):
        some = [key for key in keys if key in self.sizes and key not in self.pinned]
        self.policy.pin_all(some)
        self.pinned.update(some)

    @rule(keys=KEY_LISTS)
    def unpin(self, keys):
        some = [key for key in keys if key in self.pinned]
        self.policy.unpin_all(some)
        self.pinned.difference_update(some)
        # Back in the order, as the newest of the cold keys.
        again = [key for key in some if key in self.cold]
        self.cold = [key for key in self.cold if key not in again] + again

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key):
        if key in self.sizes:
            assert self.policy.remove(key) == self.sizes[key]
            self.forget(key)

    @rule(size=st.integers(0, 60))
    def evict_bytes(self, size):
        evicted = self.policy.evict_bytes(size)
        freed = sum(self.sizes[key] for key in evicted)
        assert freed - (self.sizes[evicted[-1]] if evicted else 0) < max(size, 1)
        self.evicted(evicted)
        assert freed >= size or not self.sizes.keys() - self.pinned

    @invariant()
    def same(self):
        self.policy.check_integrity()
        assert self.policy.used_bytes == sum(self.sizes.values())
        assert all((key in self.policy) == (key in self.sizes) for key in KEYS)


@pytest.mark.slow
def test_counts_stay_right_whatever_is_called():
    Contract.TestCase.settings = examples(60, stateful_step_count=60)
    Contract.TestCase().runTest()


def stored(policy, keys, tokens=0):
    """A request whose chunks the policy does not have all yet; return how many of the first ones it had."""
    found = next((n for n, key in enumerate(keys) if key not in policy), len(keys))
    # The request holds what there is, so that this is not evicted for its other chunks.
    held, new = [key for key in keys if key in policy], [key for key in keys if key not in policy]
    policy.pin_all(held)
    if (missing := policy.used_bytes + len(new) - policy.capacity_bytes) > 0:
        policy.evict_bytes(missing)
    policy.unpin_all(held)
    policy.admit_all(new[::-1], 1)
    policy.mark_used(keys, tokens)
    return found


def keys_of(name, chunks):
    return [b"%s %d" % (name, n) for n in range(chunks)]


def chats_of_three_turns(rounds):
    """Twenty users in random order. Each turn adds three chunks. After the third a new chat begins."""
    chance, names = random.Random(0), count()
    chats = [(b"chat %d" % next(names), 0) for _ in range(20)]
    for _ in range(rounds):
        user = chance.randrange(20)
        name, turn = chats[user]
        yield turn, keys_of(name, 3 * (turn + 1))
        chats[user] = (name, turn + 1) if turn < 2 else (b"chat %d" % next(names), 0)


def chats_and_questions(rounds):
    """Ten users whose prompts grow with each turn, and after each turn three questions, asked once."""
    chance, asked = random.Random(0), count()
    turns = [0] * 10
    for _ in range(rounds):
        user = chance.randrange(10)
        turns[user] = turns[user] % 8 + 1
        yield keys_of(b"user %d" % user, 3 * turns[user])
        yield from (keys_of(b"question %d" % next(asked), 6) for _ in range(3))


def test_prompts_that_return_are_kept_and_questions_are_not():
    found = {}
    for make in (LRU, ARC, S3FIFO, HitDensity):
        policy = make(150)
        found[make] = sum(stored(policy, keys) for keys in chats_and_questions(500))
        policy.check_integrity()
    assert found[HitDensity] > 1.1 * max(found[make] for make in (LRU, ARC, S3FIFO))
    assert found[HitDensity] > 2 * found[LRU]


def test_without_any_use_it_evicts_what_was_stored_first():
    policy, oldest = HitDensity(8), LRU(8)
    for number in range(100):
        for one in (policy, oldest):
            stored(one, keys_of(b"%d" % number, 2))
        assert [number for number in range(100) if b"%d 0" % number in policy] == [
            number for number in range(100) if b"%d 0" % number in oldest
        ]


def test_a_prefix_is_evicted_from_its_end():
    policy = HitDensity(100)
    stored(policy, keys_of(b"a", 5))
    assert policy.evict_bytes(3) == [b"a 4", b"a 3", b"a 2"]


def test_the_start_of_a_prefix_outlives_what_continues_it_though_that_costs_more():
    policy = HitDensity(100)
    stored(policy, keys_of(b"a", 4), tokens=100_000)
    stored(policy, keys_of(b"a", 10), tokens=300_000)
    assert policy.evict_bytes(7) == [b"a %d" % n for n in (9, 8, 7, 6, 5, 4, 3)]


def test_chunks_of_a_step_are_evicted_in_the_order_in_which_they_were_admitted():
    policy = HitDensity(100)
    policy.admit_all([b"last", b"middle", b"first"], 1)
    assert policy.evict_bytes(2) == [b"last", b"middle"]


def test_of_prompts_with_the_same_history_the_longer_one_stays():
    policy = HitDensity(100)
    stored(policy, keys_of(b"long", 10), tokens=100_000)
    stored(policy, keys_of(b"short", 10), tokens=1000)
    assert {key.split()[0] for key in policy.evict_bytes(10)} == {b"short"}


def test_a_request_evicts_nothing_that_it_has_found_for_its_new_chunks():
    policy = HitDensity(100)
    for name in (b"a", b"b", b"c", b"d"):
        stored(policy, keys_of(name, 4))
    policy.touch_all(keys_of(b"a", 4)[::-1])
    policy.admit_all([b"a 5", b"a 4"], 1)
    assert policy.evict_bytes(4) == [b"b %d" % n for n in (3, 2, 1, 0)]
    policy.mark_used(keys_of(b"a", 6))
    policy.check_integrity()


def test_a_chunk_that_was_to_go_next_stays_if_a_request_finds_it():
    policies = [HitDensity(100) for _ in range(2)]
    for policy in policies:
        for number in range(70):  # of so many runs, two are chosen at a time
            stored(policy, keys_of(b"%d" % number, 1))
    first, second = policies[0].evict(), policies[0].evict()
    assert policies[1].evict() == first
    policies[1].touch(second)
    assert second not in [policies[1].evict() for _ in range(20)]


def test_new_chunks_stay_like_old_ones_that_are_far_from_the_start():
    policy = HitDensity(100)
    stored(policy, keys_of(b"a", 5), tokens=300_000)
    policy.admit_all(keys_of(b"b", 5)[::-1], 1)
    assert {key.split()[0] for key in policy.evict_bytes(5)} == {b"a"}


def test_a_chunk_that_was_evicted_is_known_when_it_comes_back():
    policy = HitDensity(4)
    for name in (b"a", b"b", b"a", b"b"):
        assert stored(policy, keys_of(name, 4)) == 0
    assert policy._uses[b"b 0"] == 2
    stored(policy, keys_of(b"new", 2))
    assert policy._uses[b"new 0"] == 1
    # The room is limited.
    for number in range(20):
        stored(policy, keys_of(b"%d" % number, 4))
    assert b"a 0" not in policy._uses
    policy.check_integrity()


def test_a_removed_key_that_comes_back_at_once_is_evicted_as_the_newest():
    policy = HitDensity(100)
    policy.admit_all([b"a", b"b"], 1)
    policy.remove(b"a")
    policy.admit(b"a", 1)
    policy.check_integrity()
    assert policy.evict_bytes(2) == [b"b", b"a"]


def test_a_key_that_was_pinned_while_its_run_was_evicted_is_evicted_later():
    policy = HitDensity(100)
    stored(policy, keys_of(b"a", 3))
    policy.pin(b"a 1")
    assert policy.evict_bytes(3) == [b"a 2", b"a 0"]
    policy.unpin(b"a 1")
    assert policy.evict() == b"a 1"


@given(
    sums=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 1 << 20), st.integers(1, 100), st.integers(0, 50)),
        max_size=30,
    )
)
@examples(40)
def test_density_is_the_best_ratio_of_returned_to_observed_bytes(sums):
    times = ReturnTimes(3, 2)
    returned, observed = np.zeros((3, 2, 24)), np.zeros((3, 2, 24))
    for of, age, size, requests in sums:
        at = of // 2, of % 2, max(age, 1).bit_length() - 1
        assert age_numbers(np.array([age]))[0] == at[2]
        times.add_returned(np.array([of]), np.array([age]), np.array([size]))
        times.add_observed(np.array([of]), np.array([age]), np.array([size * requests]))
        returned[at] += size
        observed[at] += size * requests
    times.forget(0.5)
    returned, observed, chunk = returned / 2, observed / 2, 10.0
    found = times.densities(chunk)
    for use, habit, first in np.ndindex(3, 2, 24):
        best, gained, spent = 0.0, 0.0, 0.0
        for age in range(first, 24):
            of_use = returned[use, :, age].sum(), observed[use, :, age].sum()
            hazard = (of_use[0] + chunk) / (of_use[1] + chunk * 4 * 2**age)
            gained += returned[use, habit, age] + 8 * chunk
            spent += observed[use, habit, age] + 8 * chunk / hazard
            best = max(best, gained / spent)
        assert found[use * 2 + habit, first] == pytest.approx(best)


def test_a_chat_that_has_had_its_last_turn_goes_first():
    def found(policy):
        return sum(stored(policy, keys) for turn, keys in chats_of_three_turns(1500) if turn)

    # All chats together have 90 chunks at most that will be used.
    density, lru = (found(policy(100)) for policy in (HitDensity, LRU))
    assert density > 1.1 * lru
