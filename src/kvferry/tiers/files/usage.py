"""The usage of a directory, and a search for another namespace whose model has the same name."""

from __future__ import annotations

import os

from kvferry.errors import Unnameable
from kvferry.keys.namespace import Namespace
from kvferry.tiers.files.ledger import read_ledger
from kvferry.tiers.files.regular_file import check_folders, read_regular
from kvferry.tiers.paths import note_name
from kvferry.tiers.storage_tier import StoreUsage

_MAX_NOTE_BYTES = 1 << 20


class UsageReader:
    """Reads the capacity and the bytes in use of a directory. Not thread-safe; every call blocks."""

    def __init__(self, root: str, namespace: Namespace) -> None:
        self._root, self._ours, self._name = root, namespace.digest.hex(), namespace.name
        self._names: dict[str, str] = {}
        self._last = StoreUsage()

    def read(self, *, empty: bool) -> StoreUsage:
        """Return the usage of the directory. A value that cannot be read keeps its last known value.

        Args:
            empty: True to name another namespace of a model with the same name, if there is one. Its engines
                probably differ in a setting, which is why this one finds no chunks.
        """
        capacity, used = read_ledger(self._root) or (self._last.capacity, self._last.used)
        self._last = StoreUsage(used, capacity, self._same_name_namespace() if empty else "")
        return self._last

    def _same_name_namespace(self) -> str:
        """Return the digest, in hex, of another namespace of a model of this name; empty if there is none."""
        try:
            folders = [name for name in os.listdir(self._root) if len(name) == len(self._ours)]
        except OSError:
            return self._last.same_name_namespace
        # Notes never change, so each is read once.
        names = {
            name: self._names.get(name) or self._model_name(name) for name in folders if name != self._ours
        }
        self._names = names
        return next((digest for digest, name in sorted(names.items()) if name and name == self._name), "")

    def _model_name(self, digest: str) -> str:
        try:
            note = f"{self._root}/{note_name(bytes.fromhex(digest))}"
            check_folders(self._root, note)
            return Namespace.read(read_regular(note, _MAX_NOTE_BYTES).decode("ascii")).name
        except (OSError, ValueError, Unnameable):
            return ""
