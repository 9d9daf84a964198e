"""What was there lately: forgotten in time, never invented; and who remembers it."""

from __future__ import annotations

from hashlib import blake2b

from hypothesis import given, strategies as st

from kvferry.tiers.index import ListedKeys, RecentlyEvicted, TierKeys, tags_of
from support.chunk_files import key
from support.examples import examples
from support.stores import FILE_BYTES, Clock, file_of, keep, open_store


def keys(count: int) -> list[bytes]:
    return [blake2b(b"%d" % number, digest_size=32).digest() for number in range(count)]


@examples(60)
@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "clear"]), st.integers(0, 40))))
def test_a_tier_remembers_the_keys_that_it_had_and_lost(steps) -> None:
    some, tier, here, lost = keys(41), TierKeys(), set(), set()
    for what, number in steps:
        if what == "clear":
            tier.clear()
            here, lost = set(), set()
        elif what == "add":
            tier.add(some[number])
            here.add(some[number])
        else:
            tier.discard(some[number])
            lost |= here & {some[number]}
            here.discard(some[number])
        assert tier.contains(tags_of(some)).tolist() == [each in here for each in some]
        assert {each for each in some if each in tier.recently_evicted} == lost


def test_later_keys_replace_the_earlier_ones() -> None:
    memory, some = RecentlyEvicted(slots=64), keys(1000)
    for each in some:
        memory.add(each)
    left = [number for number, each in enumerate(some) if each in memory]
    assert len(left) == 64
    assert len([number for number in left if number > 800]) > 48
    assert not any(each in memory for each in keys(2000)[1000:])


def test_keys_of_one_chunk_of_several_groups_do_not_share_a_slot() -> None:
    memory, (one,) = RecentlyEvicted(), keys(1)
    of_groups = [one[:-1] + bytes((group,)) for group in range(6)]
    for number, each in enumerate(of_groups, 1):
        memory.add(each)
        assert [other in memory for other in of_groups] == [True] * number + [False] * (6 - number)


def test_a_directory_remembers_what_this_process_and_others_evicted(tmp_path) -> None:
    clock = Clock()
    store = open_store(tmp_path, capacity=4 * FILE_BYTES, clock=clock)
    for number in (2, 0, 1):
        clock.now += 60
        keep(store, number)
    assert not any(key(number) in store.keys.recently_evicted for number in range(4))
    file_of(tmp_path, 1).unlink()
    store.refresh()
    keep(store, 3)
    assert [key(number) in store.keys.recently_evicted for number in range(4)] == [False, True, True, False]


def test_a_listing_remembers_what_it_has_no_longer() -> None:
    tier, (one, other, never) = TierKeys(), keys(3)
    known = ListedKeys(tier)
    known.add(one)
    known.add(other)
    known.discard(never)
    known.discard(other)
    assert [each in tier.recently_evicted for each in (one, other, never)] == [False, True, False]
    with known.listing():
        known.add_page([])
    assert one in tier.recently_evicted
