"""What must go for new chunks: the oldest first, however many there are and whoever walks."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, strategies as st

from kvferry.tiers.files import space
from kvferry.tiers.files.ledger import read_ledger
from kvferry.tiers.files.space import LeastRecentlyUsed
from kvferry.tiers.names import PutOutcome
from support.chunk_files import key
from support.examples import examples
from support.stores import FILE_BYTES, file_of, keep, open_store, total


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 9), st.text(max_size=2))), st.integers(1, 5))
def test_the_oldest_are_listed_in_order_and_whether_there_are_more(files, most):
    oldest = LeastRecentlyUsed(most)
    for used, path in files:
        oldest.add(used, path)
    listed, more = oldest.listed(), oldest.more
    assert [used for used, _ in listed] == sorted(used for used, _ in files)[:most]
    assert more == (len(files) > most)
    left = list(files)
    for one in listed:
        left.remove(one)


def test_more_go_than_are_listed_at_once(tmp_path, clock):
    store = open_store(tmp_path, capacity=1 << 20, clock=clock)
    for number in range(12):
        clock.now += 60
        keep(store, number)
    open_store(tmp_path, capacity=4 * FILE_BYTES, clock=clock, max_listed=3)
    assert total(tmp_path) <= 4 * FILE_BYTES
    assert [file_of(tmp_path, number).exists() for number in range(12)] == [False] * 9 + [True] * 3


def test_the_oldest_go_first_from_walk_to_walk(tmp_path, clock):
    store = open_store(tmp_path, capacity=8 * FILE_BYTES, clock=clock, max_listed=3)
    for number in range(30):
        clock.now += 60
        assert keep(store, number) is PutOutcome.STORED
        there = [file_of(tmp_path, earlier).exists() for earlier in range(number + 1)]
        assert there == sorted(there)
        assert total(tmp_path) <= 8 * FILE_BYTES
    assert sum(there) == 7


def test_files_that_cannot_be_removed_do_not_keep_it_walking(tmp_path, monkeypatch):
    store = open_store(tmp_path, capacity=8 * FILE_BYTES, max_listed=3)
    for number in range(7):
        keep(store, number)
    monkeypatch.setattr(space.os, "unlink", refused)
    assert keep(store, 7) is PutOutcome.FULL
    assert store.stats.evicted == 0


def test_threads_that_need_room_share_a_walk(tmp_path, monkeypatch):
    store = open_store(tmp_path, capacity=40 * FILE_BYTES)
    for number in range(39):
        keep(store, number)
    walks, walk = [], space.walk

    def slow(root):
        walks.append(root)
        time.sleep(0.05)
        return walk(root)

    monkeypatch.setattr(space, "walk", slow)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda number: keep(store, number), range(100, 116))) == {PutOutcome.STORED}
    assert len(walks) == 1
    assert not store.contains([key(0)])
    assert read_ledger(tmp_path)[1] == total(tmp_path)


def refused(path):
    raise PermissionError(path)
