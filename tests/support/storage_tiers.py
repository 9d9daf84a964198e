"""One example of each kind of storage tier, over a folder. Every registered kind must have one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.tiers.files.settings import FileSettings
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.storage_settings import StorageSettings


def damage_files(folder: Path) -> None:
    """Change one byte of every chunk in a folder."""
    for path in folder.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


@dataclass(frozen=True)
class Example:
    """A tier that needs nothing but an empty folder.

    Attributes:
        settings: returns the settings of a tier whose storage is in a folder.
        damage: changes each chunk in that storage, so that its checksum is wrong.
        unusable: settings that `check` accepts, but with which nothing can be opened.
    """

    settings: Callable[[Path], StorageSettings]
    damage: Callable[[Path], None]
    unusable: StorageSettings


EXAMPLES: Mapping[str, Example] = {
    "file": Example(lambda folder: FileSettings(str(folder)), damage_files, FileSettings("/dev/null/none")),
    "object": Example(
        lambda folder: ObjectSettings(f"file://{folder}"), damage_files, ObjectSettings("odd://bucket")
    ),
}


def example_of(kind: str) -> Example:
    """Return the example of a kind; fail if there is none."""
    assert kind in EXAMPLES, f"add an example of a {kind} tier to tests/support/storage_tiers.py"
    return EXAMPLES[kind]
