"""What lies around a namespace: how full its place is, and whether another one has the same model's name."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvferry.errors import Unnameable
from kvferry.keys.namespace import Namespace
from kvferry.tiers.files.ledger import read_ledger
from kvferry.tiers.files.regular_file import check_folders, read_regular
from kvferry.tiers.paths import note_name

_LONGEST_NOTE = 1 << 20


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """See the module.

    Attributes:
        used, capacity: bytes of all namespaces together; None where that is not known.
        stranger: digest, in hex, of another namespace whose model has the same name, where this one has
            nothing; empty if there is none, or this one has something.
    """

    used: int | None = None
    capacity: int | None = None
    stranger: str = ""


class UsageReader:
    """Looks at a directory. For one thread; every call blocks."""

    def __init__(self, root: str, namespace: Namespace) -> None:
        """See the module.

        Args:
            root: the directory.
            namespace: that is ours.
        """
        self._root, self._ours, self._name = root, namespace.digest.hex(), namespace.name
        self._names: dict[str, str] = {}
        self._last = StoreUsage()

    def look(self, *, empty: bool) -> StoreUsage:
        """What there is now; what cannot be read is as it was.

        Args:
            empty: our namespace has nothing.
        """
        capacity, used = read_ledger(self._root) or (self._last.capacity, self._last.used)
        self._last = StoreUsage(used, capacity, self._stranger() if empty else "")
        return self._last

    def _stranger(self) -> str:
        try:
            folders = [name for name in os.listdir(self._root) if len(name) == len(self._ours)]
        except OSError:
            return self._last.stranger
        names = {name: self._names.get(name) or self._read(name) for name in folders if name != self._ours}
        self._names = names
        return next((digest for digest, name in sorted(names.items()) if name and name == self._name), "")

    def _read(self, digest: str) -> str:
        """The model's name of a namespace; empty where there is no note to believe."""
        try:
            note = f"{self._root}/{note_name(bytes.fromhex(digest))}"
            check_folders(self._root, note)
            return Namespace.read(read_regular(note, _LONGEST_NOTE).decode("ascii")).name
        except (OSError, ValueError, Unnameable):
            return ""
