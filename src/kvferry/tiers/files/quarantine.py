"""Moving a bad file out of the way, where an operator can look at it."""

from __future__ import annotations

import os
from contextlib import suppress

from kvferry.tiers.files.ledger import Ledger
from kvferry.tiers.files.lock_handoff import LockTimeout
from kvferry.tiers.files.regular_file import NotRegular, check_folders, make_folder
from kvferry.tiers.paths import quarantine_path


def quarantine_file(root: str, ledger: Ledger, found: os.stat_result, path: str) -> bool:
    """Move what has the name of a chunk to quarantine, where the bytes of a file still count.

    Where it cannot be moved, a file is removed: what has a chunk's name keeps others from storing it.

    Args:
        root: the directory of the tier.
        ledger: its ledger; held meanwhile.
        found: what it was: another one that has taken its place meanwhile stays.
        path: its name.

    Returns:
        Whether it was moved.
    """
    with suppress(LockTimeout, OSError), ledger.held() as account:
        check_folders(root, path)
        if os.path.samestat(found, os.lstat(path)):
            aside = quarantine_path(root, path)
            try:
                make_folder(root, os.path.dirname(aside))
                os.rename(path, aside)
            except NotRegular:
                os.unlink(path)
                account.count()
            else:
                return True
    return False
