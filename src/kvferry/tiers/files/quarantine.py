"""Quarantine for bad files, where an operator can inspect them."""

from __future__ import annotations

import os
from contextlib import suppress

from kvferry.tiers.files.ledger import Ledger
from kvferry.tiers.files.lock_handoff import LockTimeout
from kvferry.tiers.files.regular_file import NotRegular, check_folders, make_folder
from kvferry.tiers.paths import quarantine_path


def quarantine_file(root: str, ledger: Ledger, found: os.stat_result, path: str) -> bool:
    """Move a bad file to quarantine, where its bytes still count.

    If there is no plain quarantine folder, the file is removed: while it has a chunk's name, no process can
    store that chunk.

    Args:
        root: the directory of the tier.
        ledger: the ledger of the directory, which is held during the move.
        found: status of the bad file; a file that has replaced it meanwhile stays.
        path: path of the bad file.

    Returns:
        Whether the file was moved.
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
