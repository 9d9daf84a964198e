"""Clocks that jump, and clocks of several machines that disagree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.tiers.files.ledger import read_ledger
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.paths import temporary_path
from support.chunk_files import key
from support.stores import FILE_BYTES, fetch, file_of, keep, open_store, total

DAY = 86_400.0
ROOM = 6


def kept(store) -> list[int]:
    return [n for n in range(60) if store.contains([key(n)])[0]]


@pytest.mark.parametrize("jump", [DAY, -DAY, 400 * DAY, -400 * DAY], ids=lambda jump: f"{jump / DAY:+g} days")
def test_chunks_stored_after_a_clock_jump_outlast_earlier_ones(tmp_path, clock, jump):
    store = open_store(tmp_path, capacity=ROOM * FILE_BYTES + 8192, clock=clock)
    for number in range(ROOM):
        assert keep(store, number) is PutOutcome.STORED
        clock.now += 1
    clock.now += jump
    # Of one directory: another process that looks at it now, and this one, whose list is from before.
    for one, first in ((open_store(tmp_path, clock=clock), ROOM), (store, ROOM + 3)):
        for number in range(first, first + 3):
            assert keep(one, number) is PutOutcome.STORED
            clock.now += 1
    store.refresh()
    assert kept(store) == list(range(ROOM, 2 * ROOM)), "the new ones went, the old ones stayed"
    assert read_ledger(str(tmp_path))[1] == total(tmp_path)


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_chunks_used_after_a_clock_jump_stay_longest(tmp_path, clock, jump):
    store = open_store(tmp_path, capacity=ROOM * FILE_BYTES + 8192, clock=clock)
    for number in range(ROOM):
        keep(store, number)
        clock.now += 20
    clock.now += jump
    store.mark_used([key(3), key(1)])
    for number in range(10, 14):
        clock.now += 20
        assert keep(store, number) is PutOutcome.STORED
    assert kept(store) == [1, 3, 10, 11, 12, 13]
    assert fetch(store, 1) == (GetOutcome.HIT, True)


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_leftover_of_another_machine_goes_whatever_the_clock_did(tmp_path, clock, jump):
    store = open_store(tmp_path, capacity=1 << 20, clock=clock)
    keep(store, 1)
    name = temporary_path(str(file_of(tmp_path, 1)), 1000).split(".")
    name[-3] = "0" * 32
    left = Path(".".join(name))
    left.write_bytes(bytes(100))
    os.utime(left, (clock.now, clock.now))
    open_store(tmp_path, clock=clock)
    assert left.exists(), "its writer may be at work on another machine"
    clock.now += jump
    assert open_store(tmp_path, clock=clock).stats.swept == 1


def test_chunks_of_others_are_listed_though_the_clock_was_set_back(tmp_path, clock):
    clock.now = 4e9  # the file system's is earlier
    store, other = (open_store(tmp_path, capacity=1 << 20, clock=clock) for _ in range(2))
    for number, now in enumerate((4e9, 1e9, 4e9)):
        clock.now = now
        keep(other, number)
        store.refresh()
        assert kept(store) == list(range(number + 1))
