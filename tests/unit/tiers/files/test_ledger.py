"""The ledger of a directory: what is told when it is made again."""

from kvferry.tiers.files.ledger import Ledger


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
