"""Tags say of every key in which places it is, as a set for each place would."""

from __future__ import annotations

import threading
from itertools import count

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvferry.tiers.index import MAX_TIERS, KeyTable, TagRows, TierKeys, tags_of
from support.examples import examples

# Few beginnings and many groups: keys that share a row, and what one chunk's groups have in common.
KEYS = st.builds(
    lambda low, group: bytes(24) + low.to_bytes(7, "little") + bytes((group,)),
    st.sampled_from([0, 1, 1 << 40, *(at << 30 for at in range(1, 40))]),
    st.integers(0, 7),
)
PLACES = 3
CHANGES = st.lists(st.tuples(KEYS, st.integers(0, PLACES - 1), st.booleans()), max_size=300)


def drawn(number, size=32, seed=3):
    """Keys as digests are."""
    memory = np.random.default_rng(seed).bytes(size * number)
    return [memory[at : at + size] for at in range(0, len(memory), size)]


def tags_with(keys, table=None):
    tags = TierKeys(table)
    for key in keys:
        tags.add(key)
    return tags


def growing_table():
    """A table that grows most of the time: from few rows on, a row at a time."""
    return KeyTable(first_rows=2, rows_per_step=1)


@examples(100)
@given(CHANGES, st.lists(KEYS, max_size=50), st.integers(0, PLACES - 1))
def test_table_equals_a_set_of_keys_for_each_tier(changes, others, cleared):
    table = growing_table()
    places, there = [TierKeys(table) for _ in range(PLACES)], [set() for _ in range(PLACES)]
    asked = [key for key, *_ in changes] + others

    def check():
        for tags, keys in zip(places, there, strict=True):
            assert tags.contains(tags_of(asked)).tolist() == [key in keys for key in asked]
            assert len(tags) == len(keys)
        bits = [sum(tags.bit for tags, of in zip(places, there, strict=True) if key in of) for key in asked]
        assert table.tier_bits(tags_of(asked)).tolist() == bits
        assert len(table) == len(set.union(*there))

    for key, place, comes in changes:
        for of in (places[place], there[place]):
            (of.add if comes else of.discard)(key)
    check()
    for of in (places[cleared], there[cleared]):
        of.clear()
    check()


def alike(number):
    """Keys that somebody chose to share one row."""
    return [bytes(24) + (at << 40).to_bytes(8, "little") for at in range(number)]


@pytest.mark.parametrize("make", [drawn, alike])
def test_none_is_lost_and_none_comes_back_while_the_table_grows(make):
    keys = make(1200)
    table = growing_table()
    one, other, cleared = TierKeys(table), TierKeys(table), tags_with(keys[:100], table)
    growing = 0
    for at, key in enumerate(keys):  # whose row has been moved, or has not
        one.add(key)
        other.add(key)
        (one if at % 2 else other).discard(keys[at // 2])
        if at % 7 == 0:
            growing += table._next is not table._rows
            if growing == 3:
                cleared.clear()
            assert cleared.contains(tags_of(keys)).tolist() == [n < 100 and growing < 3 for n in range(1200)]
            gone = {at // 2 for at in range(1, at + 1, 2)}
            assert one.contains(tags_of(keys)).tolist() == [n <= at and n not in gone for n in range(1200)]
            gone = {at // 2 for at in range(0, at + 1, 2)}
            assert other.contains(tags_of(keys)).tolist() == [n <= at and n not in gone for n in range(1200)]
    assert growing > 20, "it was asked and changed while it grew"


def test_rows_hold_two_in_the_mean_and_hardly_one_runs_over():
    table = KeyTable()
    tags_with(drawn(20_000), table)
    assert table._rows.rows == 16384
    assert len(table._rows.overflow) < 20_000 / 1000


def test_groups_of_a_chunk_do_not_crowd_one_row():
    table = KeyTable()
    tags_with((chunk + bytes((group,)) for chunk in drawn(1000, 31) for group in range(12)), table)
    assert len(table._rows.overflow) < 12_000 / 500


def test_overflowed_tags_are_found_and_discarded():
    keys = alike(100)
    table = KeyTable()
    tags = tags_with(keys, table)
    assert len(table._rows.overflow) == 93
    assert tags.contains(tags_of(keys)).all()
    for key in keys[::2]:
        tags.discard(key)
    assert tags.contains(tags_of(keys)).tolist() == [at % 2 == 1 for at in range(100)]
    assert len(table._rows.overflow) == 47
    tags.clear()
    assert (len(tags), len(table._rows.overflow)) == (0, 0)


def test_lookup_during_additions_of_other_threads_finds_all_earlier_tags():
    keys, table = drawn(20_000, seed=5), KeyTable()
    tags, asked = tags_with(keys[:1500], table), tags_of(keys[:1500])
    others = [TierKeys(table) for _ in range(3)]

    def change(mine):
        for key in keys:
            mine.add(key)
        for key in keys[::2]:
            mine.discard(key)

    changing = [threading.Thread(target=change, args=(mine,)) for mine in others]
    for thread in changing:
        thread.start()
    looks = count()
    while any(thread.is_alive() for thread in changing):
        assert tags.contains(asked).all()
        next(looks)
    assert next(looks) > 10
    for mine in others:
        assert mine.contains(tags_of(keys)).tolist() == [False, True] * 10_000
    assert (len(tags), len(table)) == (1500, 10_000 + 750)


def test_overflowed_tag_is_never_missing_while_another_tier_changes():
    """Who asks takes no lock: between two steps of a change it is in the one place or in the other."""

    class Never(dict):
        def pop(self, tag):
            raise AssertionError(f"{tag} is nowhere for a moment")

    tags, rows = tags_of(alike(20)), TagRows(128)
    for tag in tags.tolist():
        rows.update(tag, keep=0, add=1)
    rows.overflow = Never(rows.overflow)
    for tag in tags.tolist():
        rows.update(tag, keep=1, add=2)
        rows.update(tag, keep=1, add=0)
    assert rows.tier_bits(tags).tolist() == [1] * 20


@pytest.mark.parametrize("asked", [0, 1])
def test_any_number_may_be_asked_for(asked):
    assert TierKeys().contains(tags_of([bytes(32)] * asked)).tolist() == [False] * asked


def test_a_table_has_so_many_places():
    table = KeyTable()
    for _ in range(MAX_TIERS):
        last = TierKeys(table)
    last.add(bytes(32))
    assert table.tier_bits(tags_of([bytes(32)])).tolist() == [1 << MAX_TIERS - 1]
    with pytest.raises(ValueError, match=f"{MAX_TIERS} tiers already"):
        TierKeys(table)
