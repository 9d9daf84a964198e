"""Moving a bad file out of the way, where an operator can look at it."""

from __future__ import annotations

import os
from contextlib import suppress

from kvferry.tiers.ledger import Ledger
from kvferry.tiers.place import quarantine_path
from kvferry.tiers.relay import Busy


def set_aside(root: str, ledger: Ledger, fd: int, path: str) -> bool:
    """Move the file of a chunk to quarantine, where its bytes still count.

    Args:
        root: the directory of the tier.
        ledger: its ledger; held meanwhile.
        fd: the bad file, open: one that has taken its place meanwhile stays.
        path: its name.

    Returns:
        Whether it was moved.
    """
    with suppress(Busy, OSError), ledger.held():
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            os.rename(path, quarantine_path(root, path))
            return True
    return False
