"""The settings of the SQLite tier, which also open it and try it out."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from kvferry.common.errors import ConfigError
from kvferry.keys.namespace import Namespace
from kvferry.tiers.index import KeyTable
from kvferry.tiers.names import Medium
from kvferry.tiers.storage_tier import Location, StorageSettings, TrialResult

from .tier import SqliteTier


class SqliteSettings(StorageSettings, frozen=True):
    """Settings of a SQLite tier.

    Attributes:
        path: path of the database, which is created if it is missing. Its folder must exist.
    """

    kind: ClassVar[str] = "sqlite"
    medium: ClassVar[Medium] = Medium.DISK

    path: str

    def check(self, where: str) -> None:
        if not self.path:
            raise ConfigError(f"{where}: path is empty; name a file for the database")

    def check_storage(self) -> None:
        folder = Path(self.path).absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"sqlite tier: {folder} is no directory; make it, or name another path")

    @property
    def location(self) -> Location:
        path = str(Path(self.path).absolute())
        return Location(path, (path,))

    def open(self, namespace: Namespace, table: KeyTable, earlier: Sequence[StorageSettings]) -> SqliteTier:
        del earlier
        try:
            return SqliteTier(self.path, namespace, table)
        except sqlite3.Error as error:
            raise ConfigError(
                f"sqlite tier: cannot use {self.path}: {error}; see to its folder and mode"
            ) from error

    @property
    def trial_seconds(self) -> float:
        return 10.0

    def try_out(self) -> TrialResult:
        self.check_storage()
        path = Path(f"{self.path}.trial")
        try:
            database = sqlite3.connect(path)
            database.execute("CREATE TABLE trial (chunk BLOB)")
            database.close()
        except sqlite3.Error as error:
            return TrialResult(f"{self.path}: {error}", "see to its folder and mode")
        finally:
            path.unlink(missing_ok=True)
        return TrialResult(f"{self.path} can be written")
