"""Tags say of every key whether it is there, as a set would."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvferry.tiers.tags import TAG_BYTES, Tags, tags_of

# Few beginnings and many groups: keys that share a bucket, and what one chunk's groups have in common.
KEYS = st.builds(
    lambda low, group: bytes(24) + low.to_bytes(7, "little") + bytes((group,)),
    st.sampled_from([0, 1, 1 << 40, *(at << 30 for at in range(1, 40))]),
    st.integers(0, 7),
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(KEYS, st.booleans()), max_size=200), st.lists(KEYS, max_size=50))
def test_they_say_what_a_set_of_the_keys_would_say(changes, others):
    tags, there = Tags(), set()
    for key, comes in changes:
        if comes:
            tags.add(key)
            there.add(key)
        else:
            tags.discard(key)
            there.discard(key)
    asked = [key for key, _ in changes] + others
    assert tags.known(tags_of(asked)).tolist() == [key in there for key in asked]
    assert len(tags) == len(there)
    tags.clear()
    assert (len(tags), tags.known(tags_of(asked)).any()) == (0, False)


def test_none_is_lost_as_the_table_grows():
    drawn = np.random.default_rng(3).bytes(32 * 20_000)
    keys = [drawn[at : at + 32] for at in range(0, len(drawn), 32)]
    tags = Tags(keys[::2])
    assert tags.known(tags_of(keys)).tolist() == [True, False] * 10_000
    assert len(tags._table) == 4096, "buckets are a quarter full at most"
    assert not tags._over


def test_groups_of_a_chunk_do_not_crowd_one_bucket():
    drawn = np.random.default_rng(3).bytes(31 * 1000)
    chunks = [drawn[at : at + 31] for at in range(0, len(drawn), 31)]
    assert not Tags(chunk + bytes((group,)) for chunk in chunks for group in range(12))._over


def test_keys_that_somebody_chose_to_share_a_bucket_cost_no_memory():
    keys = [bytes(24) + (at << 40).to_bytes(TAG_BYTES, "little") for at in range(1, 100)]
    tags = Tags(keys)
    assert tags.known(tags_of(keys)).all()
    assert len(tags._table) == 64
    for key in keys[::2]:
        tags.discard(key)
    assert tags.known(tags_of(keys)).tolist() == [at % 2 == 1 for at in range(99)]


def test_who_asks_while_another_thread_adds_sees_all_that_was_there():
    drawn = np.random.default_rng(5).bytes(32 * 60_000)
    keys = [drawn[at : at + 32] for at in range(0, len(drawn), 32)]
    tags, asked = Tags(keys[:1500]), tags_of(keys[:1500])
    adding = threading.Thread(target=lambda: [tags.add(key) for key in keys[1500:]])
    adding.start()
    while adding.is_alive():
        assert tags.known(asked).all()
    adding.join()
    assert tags.known(tags_of(keys)).all()


@pytest.mark.parametrize("count", [0, 1])
def test_any_number_may_be_asked_for(count):
    assert Tags().known(tags_of([bytes(32)] * count)).tolist() == [False] * count
