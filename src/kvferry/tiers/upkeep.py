"""What an operator does to a directory of the file tier, while engines may be using it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.tiers.ledger import Account, Ledger
from kvferry.tiers.opening import cannot
from kvferry.tiers.outcome import Tally
from kvferry.tiers.place import MARKER, Kind, folders, walk
from kvferry.tiers.relay import Busy
from kvferry.tiers.room import Room

# Engines may be counting a large directory.
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Collected:
    """What collecting has done.

    Attributes:
        swept: leftovers of dead writers that were removed.
        evicted: chunks and quarantined files that had to go.
        evicted_bytes: of these.
        charged: bytes in use afterwards, as the ledger has them.
        capacity: bytes that it was evicted to.
    """

    swept: int
    evicted: int
    evicted_bytes: int
    charged: int
    capacity: int


def collect(root: str, capacity: int | None = None) -> Collected:
    """Sweep what dead writers left, count anew, and evict what was used longest ago.

    Args:
        root: the directory.
        capacity: bytes to evict to, this once; None: what the directory may hold.

    Raises:
        ConfigError: the directory cannot be used, or its capacity is not known and none is given.
    """
    tally = Tally()
    ledger = Ledger(root, _PATIENCE_SECONDS)
    room = Room(root, ledger, tally, lambda _: None)
    with _held(root, ledger) as account:
        goal = account.capacity if capacity is None else capacity
        if not goal and capacity is None:
            raise ConfigError(f"the ledger of {root} was lost, and the capacity with it; give a capacity")
        room.settle(account)
        room.make_room(account, account.capacity - goal)
        done = tally.stats()
        return Collected(done.swept, done.evicted, done.evicted_bytes, account.used, goal)


def clear(root: str) -> tuple[int, int]:
    """Remove everything of kvferry's; other files, and folders that hold some, stay.

    Returns:
        How many files were removed, and their bytes.

    Raises:
        ConfigError: the directory cannot be used.
    """
    removed, removed_bytes = 0, 0
    with _held(root, Ledger(root, _PATIENCE_SECONDS)):
        # The lock and the marker last: who is interrupted here can clear again.
        last = {Kind.LEDGER: 2, Kind.NOTE: 1}
        for entry in sorted(
            walk(root), key=lambda one: (last.get(one.kind, 0), one.path == f"{root}/{MARKER}")
        ):
            try:
                size = os.lstat(entry.path).st_size
                os.unlink(entry.path)
            except FileNotFoundError:
                continue
            removed, removed_bytes = removed + 1, removed_bytes + size
        for folder in list(folders(root)):
            # Where something else lies, the folder stays.
            with suppress(OSError):
                os.rmdir(folder)
    return removed, removed_bytes


@contextmanager
def _held(root: str, ledger: Ledger) -> Iterator[Account]:
    try:
        with ledger.held() as account:
            yield account
    except Busy as error:
        raise ConfigError(f"{error}; see which process that is, and end it") from error
    except OSError as error:
        raise cannot(root, error) from error
