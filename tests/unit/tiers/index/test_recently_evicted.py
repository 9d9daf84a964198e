"""What was there lately: forgotten in time, never invented; and who remembers it."""

from __future__ import annotations

from hashlib import blake2b

from hypothesis import given, strategies as st

from kvferry.tiers.index import recently_evicted as gone
from kvferry.tiers.index.key_table import TierKeys
from kvferry.tiers.index.recently_evicted import RecentlyEvicted
from kvferry.tiers.objects.known import Known
from support.chunk_files import key
from support.stores import file_of, keep, open_store


def keys(count: int) -> list[bytes]:
    return [blake2b(b"%d" % number, digest_size=32).digest() for number in range(count)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40))))
def test_it_has_what_went_and_did_not_come_back(steps) -> None:
    some, memory, expected = keys(41), RecentlyEvicted(), set()
    for went, number in steps:
        (memory.add if went else memory.discard)(some[number])
        (expected.add if went else expected.discard)(some[number])
        assert {each for each in some if each in memory} == expected


def test_of_more_than_there_is_room_for_the_later_are_remembered(monkeypatch) -> None:
    monkeypatch.setattr(gone, "_SLOTS", 64)
    memory, some = RecentlyEvicted(), keys(1000)
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
    store = open_store(tmp_path, capacity=1 << 20)
    for number in range(3):
        keep(store, number)
    assert not any(store.had(key(number)) for number in range(4))
    file_of(tmp_path, 1).unlink()
    store.refresh()
    store._gone(str(file_of(tmp_path, 2)))
    assert [store.had(key(number)) for number in range(4)] == [False, True, True, False]


def test_a_listing_remembers_what_it_has_no_longer() -> None:
    known, (one, other, never) = Known(TierKeys()), keys(3)
    known.add(one)
    known.add(other)
    known.discard(never)
    known.discard(other)
    assert [each in known.gone for each in (one, other, never)] == [False, True, False]
    with known.listing():
        known.show([])
    assert one in known.gone
