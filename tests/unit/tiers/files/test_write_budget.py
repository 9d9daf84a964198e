"""The write budget of a directory, which its processes share in the ledger."""

from __future__ import annotations

import logging
import multiprocessing

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tiers.files.ledger import read_write_budget
from kvferry.tiers.files.tier import FileSettings
from kvferry.tiers.names import PutOutcome
from support.stores import FILE_BYTES, keep, open_store

CAPACITY = 1 << 26
HOUR = 3600.0


def test_no_more_is_written_than_the_share_of_an_hour_until_time_has_passed(tmp_path, clock, caplog):
    store = open_store(tmp_path, capacity=CAPACITY, clock=clock, write_per_day=24 * 4 * FILE_BYTES)
    done = [keep(store, number) for number in range(8)]
    assert done == [PutOutcome.STORED] * 4 + [PutOutcome.OVER_BUDGET] * 4
    assert store.usage().write_budget_left == 0.0
    assert store.stats.stored_bytes == 4 * FILE_BYTES
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "write budget used up" in said
    assert "raise write_per_day" in said
    clock.now += HOUR
    assert store.usage().write_budget_left == pytest.approx(0.96, abs=0.01)
    assert keep(store, 8) is PutOutcome.STORED


def test_chunks_beyond_the_budget_evict_nothing(tmp_path, clock):
    used = open_store(tmp_path, capacity=CAPACITY, clock=clock).usage().used
    capacity = used + 3 * FILE_BYTES + 1024  # the ledger gets a record of each tenant
    store = open_store(tmp_path, capacity=capacity, clock=clock, write_per_day=24 * 3 * FILE_BYTES)
    for number in range(6):
        keep(store, number)
    assert store.stats.evicted == 0
    assert len(store) == 3


def test_a_budget_outlives_the_process_and_counts_for_engines_that_do_not_name_it(tmp_path, clock):
    first = open_store(tmp_path, capacity=CAPACITY, clock=clock, write_per_day=24 * 4 * FILE_BYTES)
    for number in range(3):
        keep(first, number)
    other = open_store(tmp_path, clock=clock)
    assert other.usage().write_budget_left == pytest.approx(0.25, abs=0.01)
    assert [keep(other, number) for number in (10, 11)] == [PutOutcome.STORED, PutOutcome.OVER_BUDGET]
    assert keep(first, 12) is PutOutcome.OVER_BUDGET


def test_a_budget_that_is_given_again_is_not_refilled(tmp_path, clock):
    for _ in range(3):
        store = open_store(tmp_path, capacity=CAPACITY, clock=clock, write_per_day=24 * 4 * FILE_BYTES)
        keep(store, 1)
        keep(store, 2 + len(store))
    assert store.usage().write_budget_left == pytest.approx(0.0, abs=0.01)


def test_zero_removes_the_limit(tmp_path, clock):
    open_store(tmp_path, capacity=CAPACITY, clock=clock, write_per_day=1)
    store = open_store(tmp_path, clock=clock, write_per_day=0)
    assert store.usage().write_budget_left is None
    assert [keep(store, number) for number in range(4)] == [PutOutcome.STORED] * 4


def test_a_lost_ledger_keeps_the_limit(tmp_path, clock):
    store = open_store(tmp_path, capacity=CAPACITY, clock=clock, write_per_day=24 * 4 * FILE_BYTES)
    (tmp_path / "ledger").unlink()
    keep(store, 1)
    assert read_write_budget(str(tmp_path)).bytes_per_day == 24 * 4 * FILE_BYTES


def _write(path, first, done):
    store = open_store(path)
    done.put([keep(store, number) for number in range(first, first + 20)].count(PutOutcome.STORED))


def test_processes_together_stay_within_the_budget(tmp_path):
    open_store(tmp_path, capacity=CAPACITY, write_per_day=24 * 10 * FILE_BYTES)
    done = multiprocessing.Queue()
    each = [multiprocessing.Process(target=_write, args=(tmp_path, 100 * n, done)) for n in range(3)]
    for one in each:
        one.start()
    stored = [done.get(timeout=60) for _ in each]
    for one in each:
        one.join(60)
    assert 10 <= sum(stored) <= 11


def test_a_limit_beyond_any_disk_is_refused():
    with pytest.raises(ConfigError, match="more than any disk writes"):
        FileSettings(write_per_day="8192PiB").check("tiers[1]")
