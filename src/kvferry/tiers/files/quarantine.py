"""The quarantine for bad files: a folder where an operator can inspect them."""

from __future__ import annotations

import os
from contextlib import suppress

from kvferry.tiers.files.full_disk import OUT_OF_ROOM
from kvferry.tiers.files.ledger import Ledger
from kvferry.tiers.files.lock_handoff import LockTimeout
from kvferry.tiers.files.regular_file import NotRegular, check_folders, make_folder
from kvferry.tiers.paths import quarantine_path


def quarantine_file(root: str, ledger: Ledger, found: os.stat_result, path: str) -> bool:
    """Move a bad file to quarantine, where its bytes still count against the capacity.

    If something other than a folder has the quarantine folder's name, or the file system is full, the bad
    file is removed instead. It must not stay, because no process stores a chunk anew while a file with its
    name exists.

    Args:
        root: directory of the tier.
        ledger: ledger (capacity and bytes in use) of the directory. Its lock is held during the move.
        found: result of `os.stat` for the bad file. If the file at `path` is now another one, nothing is
            moved.
        path: path of the bad file.

    Returns:
        True if the file was moved. False if it was removed, had been replaced, or could not be moved.
    """
    with suppress(LockTimeout, OSError), ledger.held() as held_ledger:
        check_folders(root, path)
        if os.path.samestat(found, os.lstat(path)):
            aside = quarantine_path(root, path)
            try:
                make_folder(root, os.path.dirname(aside))
                os.rename(path, aside)
            except OSError as error:
                if not isinstance(error, NotRegular) and error.errno not in OUT_OF_ROOM:
                    raise
                os.unlink(path)
                held_ledger.count()
            else:
                return True
    return False
