"""The ledger of a directory: its loss, waiting for it, and room counted to the byte."""

from itertools import count

import pytest

from kvferry.tiers.files.ledger import Ledger, LockTimeout, read_ledger
from kvferry.tiers.names import PutOutcome
from support.stores import FILE_BYTES, keep, open_store


def test_a_loss_is_told_once_and_not_when_the_ledger_is_there(tmp_path):
    ledger, told = Ledger(str(tmp_path), 1.0), []
    ledger.after_loss = told.append
    for expected in (1, 1, 1):
        with ledger.held() as account:
            account.limit(1 << 20)
            assert len(told) == expected
    (tmp_path / "ledger").unlink()
    for expected in (2, 2):
        with ledger.held() as account:
            assert len(told) == expected
            assert account.capacity == 1 << 20


def test_a_ledger_that_another_process_holds_is_asked_for_with_pauses(tmp_path):
    ticks, pauses = count(), []
    waiting = Ledger(str(tmp_path), 1.0, clock=lambda: next(ticks) / 10, sleep=pauses.append)
    with (
        Ledger(str(tmp_path)).held(),
        pytest.raises(LockTimeout, match="was held by other processes"),
        waiting.held(),
    ):
        pass
    assert pauses
    assert min(pauses) > 0


def test_a_store_that_just_fits_evicts_nothing(tmp_path):
    store = open_store(tmp_path, capacity=1 << 20)
    assert [keep(store, number) for number in range(2)] == [PutOutcome.STORED] * 2
    _, used = read_ledger(str(tmp_path))
    store = open_store(tmp_path, capacity=used + FILE_BYTES)
    assert (keep(store, 2), store.stats.evicted) == (PutOutcome.STORED, 0)
    assert (keep(store, 3), store.stats.evicted) == (PutOutcome.STORED, 1)
