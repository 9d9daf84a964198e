"""The settings of the file tier."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from kvferry.errors import ConfigError
from kvferry.keys.namespace import Namespace
from kvferry.tiers.files.directory_checks import check_writable, unusable_directory
from kvferry.tiers.files.tier import FileTier
from kvferry.tiers.index.key_table import KeyTable
from kvferry.tiers.names import Medium
from kvferry.tiers.paths import default_directory, find_same_directory
from kvferry.tiers.sizes import check_capacity, parse_size
from kvferry.tiers.storage_settings import Location, StorageSettings


class FileSettings(StorageSettings, frozen=True):
    """Settings of a file tier, which keeps chunks in a directory that several engines may share.

    Attributes:
        path: path of the directory, which must exist; None for the default directory, which is created in the
            user's cache directory.
        capacity: maximum size of all kvferry files in the directory: a number of bytes, or a text such as
            ``50GiB``. If None, the current capacity of the directory is kept, and a new directory gets a
            tenth of the free space.
        durable: whether to flush every chunk to the disk before it counts as stored.
    """

    kind: ClassVar[str] = "file"
    medium: ClassVar[Medium] = Medium.DISK

    path: str | None = None
    capacity: int | str | None = None
    durable: bool = False

    def check(self, where: str) -> None:
        check_capacity(where, self.capacity)
        if self.path is None:
            return
        try:
            # Such a path fails with ValueError later, not with OSError.
            usable = self.path and b"\0" not in os.fsencode(self.path)
        except UnicodeEncodeError:
            usable = False
        if not usable:
            raise ConfigError(
                f"{where}: path is {self.path!r}; name a directory, or leave it out for the default one"
            )

    def check_storage(self) -> None:
        if self.path is not None:
            check_writable(self.path)
            return
        path = Path(default_directory())
        # `Path.exists` raises an error for a directory that this user may not enter, `lexists` returns False.
        found = next(one for one in (path, *path.parents) if os.path.lexists(one))
        check_writable(str(found))

    @property
    def location(self) -> Location:
        if self.path is None:
            return Location("the default directory", ())
        path = os.path.abspath(self.path)
        return Location(path, (path,))

    def open(self, namespace: Namespace, table: KeyTable, earlier: Sequence[StorageSettings]) -> FileTier:
        path = self.path or make_default_directory()
        directories = [one.path or default_directory() for one in earlier if isinstance(one, FileSettings)]
        if twin := find_same_directory(path, directories):
            raise ConfigError(
                f"file tier: {path} and {twin}, which is a tier already, are one directory; name another, or "
                "leave out one of the two"
            )
        capacity = None if self.capacity is None else parse_size(self.capacity)
        return FileTier(path, namespace, capacity=capacity, durable=self.durable, table=table)


def make_default_directory() -> str:
    """Create the default directory if it is missing, for this user only, and return its path.

    Raises:
        ConfigError: the directory cannot be created.
    """
    path = default_directory()
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unusable_directory(path, error) from error
    return path
