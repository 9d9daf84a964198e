"""The SQLite tier keeps kvferry's contract of storage tiers."""

import sqlite3
from contextlib import closing
from pathlib import Path

from kvferry_sqlite.settings import SqliteSettings

from kvferry.tiers.registry import settings_class
from kvferry.tiers.testing import StorageTierContract


class TestSqliteTier(StorageTierContract):
    kind = SqliteSettings
    unusable = SqliteSettings("/dev/null/none")

    def settings(self, folder: Path) -> SqliteSettings:
        return SqliteSettings(f"{folder}/chunks.db")

    def damage(self, folder: Path) -> None:
        with closing(sqlite3.connect(folder / "chunks.db")) as database, database:
            for rowid, file in database.execute("SELECT rowid, file FROM chunks").fetchall():
                changed = file[:-1] + bytes([file[-1] ^ 1])
                database.execute("UPDATE chunks SET file = ? WHERE rowid = ?", (changed, rowid))


def test_the_package_adds_its_kind() -> None:
    assert settings_class("sqlite") is SqliteSettings
