"""Every kind of storage tier of this package keeps the contract, and has all that a kind here must have."""

import re
import sys
from pathlib import Path

import msgspec
import pytest

from kvferry.common.errors import ConfigError
from kvferry.connector.config import read_tiers
from kvferry.engines.vllm.compat.scheduler import hit_source
from kvferry.tiers.files.tier import FileSettings
from kvferry.tiers.fleet.settings import FleetSettings
from kvferry.tiers.names import FLEET
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.registry import (
    STORAGE_TIERS,
    TIER_KINDS,
    medium_of,
    settings_class,
    storage_kinds,
)
from kvferry.tiers.testing import StorageTierContract
from kvferry.tools.doctor.storage import OWN_CHECKS
from support.encrypted import write_keys

DOCS = Path(__file__).parents[3] / "docs" / "tiers.md"
SHARED = ("write", "load_weight")


class OverFiles(StorageTierContract):
    def damage(self, folder):
        for path in folder.rglob("*.kv"):
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)


class TestFileTier(OverFiles):
    kind = FileSettings
    unusable = FileSettings("/dev/null/none")
    has_trial = False

    def settings(self, folder):
        return FileSettings(str(folder))


class TestObjectTier(OverFiles):
    kind = ObjectSettings
    unusable = ObjectSettings("odd://bucket")

    def settings(self, folder):
        return ObjectSettings(f"file://{folder}")


class TestEncryptedFileTier(TestFileTier):
    def settings(self, folder):
        keys = write_keys(folder.with_name(f"{folder.name}.keys"), "a")
        return FileSettings(str(folder), key_file=str(keys))


class TestEncryptedObjectTier(TestObjectTier):
    def settings(self, folder):
        keys = write_keys(folder.with_name(f"{folder.name}.keys"), "a")
        return ObjectSettings(f"file://{folder}", key_file=str(keys))


# It stores nothing, so the contract of storage is not its own.
FLEET_TIER = FleetSettings(engines=("10.0.0.1:5700",), directory="valkey://10.0.0.9", port=5700)
CONTRACTS = {one.kind.kind: one for one in OverFiles.__subclasses__()}
KINDS = pytest.mark.parametrize("kind", [FLEET, *STORAGE_TIERS])


def test_every_kind_is_held_to_the_contract():
    assert {name: one.kind for name, one in CONTRACTS.items()} == STORAGE_TIERS
    assert {one.kind for one in CONTRACTS.values() if not one.has_trial} == set(OWN_CHECKS)


@KINDS
def test_the_engines_counters_have_a_label_for_a_kind(kind):
    assert hit_source(medium_of(f"{kind}.2")) is hit_source(settings_class(kind).medium)


@KINDS
def test_the_settings_of_a_kind_are_documented(kind):
    title = f'**`{{"type": "{kind}"}}`**'
    assert title in DOCS.read_text(), "a section of docs/tiers.md"
    section = re.split(r'\*\*`\{"type"|\n## ', DOCS.read_text().split(title)[1])[0]
    fields = [field.name for field in msgspec.structs.fields(settings_class(kind))]
    section += DOCS.read_text().split("\n## Wear\n")[1].split("\n## ")[0]  # of all kinds in storage
    assert [name for name in fields if name not in SHARED and f"| `{name}` |" not in section] == []


@KINDS
def test_the_settings_of_a_kind_are_read_from_a_configuration(kind, tmp_path):
    settings = FLEET_TIER if kind == FLEET else CONTRACTS[kind]().settings(tmp_path)
    given = {"type": kind, **msgspec.structs.asdict(settings), "write": "back", "load_weight": 0.5}
    expected = msgspec.structs.replace(settings, write="back", load_weight=0.5)
    assert read_tiers([given]).slow == (expected,)


GOOD = """
from kvferry.tiers.names import Medium
from kvferry.tiers.storage_tier import Location, StorageSettings

class Settings(StorageSettings, frozen=True):
    kind = "memory"
    medium = Medium.NETWORK
    def check(self, where): pass
    @property
    def location(self): return Location("memory", ())
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package that adds a kind: `code` is its only module, with the class `Settings`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def installed(package: str, kind: str = "memory", code: str = GOOD) -> None:
        (tmp_path / f"{package}.py").write_text(code)
        info = tmp_path / f"{package}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {package}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[kvferry.tiers]\n{kind} = {package}:Settings\n")
        packages.append(package)
        forget()

    packages = []

    def forget():
        storage_kinds.cache_clear()
        settings_class.cache_clear()
        for package in packages:
            sys.modules.pop(package, None)

    yield installed
    monkeypatch.undo()
    forget()


def test_a_kind_of_another_package_is_read_from_a_configuration(install):
    install("added")
    (settings,) = read_tiers([{"type": "memory", "load_weight": 0.5}]).slow
    assert (settings.kind, settings.load_weight) == ("memory", 0.5)
    assert hit_source(medium_of("memory.2")) is hit_source(ObjectSettings.medium)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import nothing_of_that_name", "package broken cannot be loaded: ModuleNotFoundError.*; install a"),
        ("1 / 0", "package broken cannot be loaded: ZeroDivisionError.*; install a release"),
        ("Settings = 7", "package broken is 7; it must be a subclass of StorageSettings"),
        (GOOD.replace('"memory"', '"other"', 1), "has kind 'other' and medium .*; they must be 'memory'"),
        (
            GOOD.replace("    medium = Medium.NETWORK\n", ""),
            "has kind 'memory' and medium None; they must be",
        ),
    ],
    ids=["import", "error", "no class", "other kind", "no medium"],
)
def test_a_package_that_cannot_be_used_costs_only_the_tiers_of_its_kind(install, tmp_path, code, said):
    install("broken", code=code)
    with pytest.raises(ConfigError, match=said):
        read_tiers([{"type": "memory"}])
    assert read_tiers([{"type": "file", "path": str(tmp_path)}]).slow == (FileSettings(str(tmp_path)),)


def test_two_packages_with_one_kind_are_refused_and_named(install):
    install("one")
    install("two")
    with pytest.raises(ConfigError, match="'memory' is added by one and two; install one package"):
        read_tiers([{"type": "memory"}])


@pytest.mark.parametrize("kind", [*TIER_KINDS, "file.2", "No Name"])
def test_no_package_takes_a_name_of_this_one_or_one_that_names_no_tier(install, tmp_path, kind):
    install("taken", kind, code="1 / 0")
    assert set(storage_kinds()) == {FLEET, *STORAGE_TIERS}
    assert read_tiers([{"type": "file", "path": str(tmp_path)}]).slow == (FileSettings(str(tmp_path)),)
