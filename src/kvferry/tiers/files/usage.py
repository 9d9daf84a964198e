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
    """Reads the capacity and the bytes in use of a directory. Not thread-safe; every call blocks.

    Args:
        root: path of the directory.
        namespace: namespace (scope of chunk keys) that this process uses.
    """

    def __init__(self, root: str, namespace: Namespace) -> None:
        self._root, self._ours, self._name = root, namespace.digest.hex(), namespace.name
        self._names: dict[str, str] = {}
        self._last = StoreUsage()

    def read(self, *, empty: bool) -> StoreUsage:
        """Return the current usage of the directory. If a value cannot be read, return its last known value.

        Args:
            empty: True if this process's namespace has no chunks. `StoreUsage.same_name_namespace` then names
                another namespace with the same model name, if there is one.
        """
        capacity, used = read_ledger(self._root) or (self._last.capacity, self._last.used)
        self._last = StoreUsage(used, capacity, self._same_name_namespace() if empty else "")
        return self._last

    def _same_name_namespace(self) -> str:
        """Find a namespace of another configuration, but with the same model name, in the directory.

        Returns:
            The digest of the namespace in hex; empty if there is none. If the directory cannot be listed, the
            digest that the previous `read` found.
        """
        try:
            folders = [name for name in os.listdir(self._root) if len(name) == len(self._ours)]
        except OSError:
            return self._last.same_name_namespace
        names = {
            name: self._names.get(name) or self._model_name(name) for name in folders if name != self._ours
        }
        self._names = names
        return next((digest for digest, name in sorted(names.items()) if name and name == self._name), "")

    def _model_name(self, digest: str) -> str:
        """Return the name of a namespace's model, from the note (file that describes the namespace).

        The name is empty if there is no valid note.

        Args:
            digest: digest of the namespace, in hex.
        """
        try:
            note = f"{self._root}/{note_name(bytes.fromhex(digest))}"
            check_folders(self._root, note)
            return Namespace.read(read_regular(note, _MAX_NOTE_BYTES).decode("ascii")).name
        except (OSError, ValueError, Unnameable):
            return ""
