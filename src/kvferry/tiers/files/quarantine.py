"""The quarantine for bad files: a folder where an operator can inspect them."""

from __future__ import annotations

import os
from contextlib import suppress

from kvferry.tiers.files.full_disk import OUT_OF_ROOM
from kvferry.tiers.files.ledger import Ledger
from kvferry.tiers.files.lock_handoff import LockTimeout
from kvferry.tiers.files.regular_file import NotRegular, check_folders, make_folder
from kvferry.tiers.paths import chunk_identity, quarantine_name


def quarantine_file(root: str, ledger: Ledger, found: os.stat_result, path: str) -> bool:
    """Move a bad file to quarantine, where its bytes still count. Return whether it was moved.

    Args:
        ledger: its lock is held during the move.
        found: `os.stat` of the bad file. If `path` is now another file, nothing is moved.
    """
    with suppress(LockTimeout, OSError), ledger.held() as held_ledger:
        check_folders(root, path)
        if os.path.samestat(found, os.lstat(path)):
            aside = f"{root}/{quarantine_name(*chunk_identity(path))}"
            try:
                make_folder(root, os.path.dirname(aside))
                os.rename(path, aside)
            except OSError as error:
                if not isinstance(error, NotRegular) and error.errno not in OUT_OF_ROOM:
                    raise
                # It must not stay: no process stores a chunk anew while a file with its name exists.
                os.unlink(path)
                # Count instead of release: something planted was never charged.
                held_ledger.count()
            else:
                return True
    return False
