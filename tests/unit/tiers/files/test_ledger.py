"""The ledger of a directory: what is told when it is made again."""

from itertools import count

import pytest

from kvferry.tiers.files.ledger import Ledger
from kvferry.tiers.files.lock_handoff import LockTimeout


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
