"""All kinds of tiers: those of this package, and those that other packages add as entry points.

Another package names its settings class as an entry point of the group ``kvferry.tiers``, under the name of
the kind. Its code is loaded only if a configuration names the kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from kvferry.common.errors import ConfigError
from kvferry.tiers.files.tier import FileSettings
from kvferry.tiers.fleet.settings import FleetSettings
from kvferry.tiers.names import FLEET, HOST, PEER, Medium, tier_kind
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.storage_tier import StorageSettings

STORAGE_TIERS: Mapping[str, type[StorageSettings]] = MappingProxyType(
    {one.kind: one for one in (FileSettings, ObjectSettings)}
)
_SETTINGS: Mapping[str, type[StorageSettings]] = MappingProxyType({FLEET: FleetSettings, **STORAGE_TIERS})
# In the order of display.
TIER_KINDS = (PEER, HOST, *_SETTINGS)
ENTRY_POINTS = "kvferry.tiers"

# A dot would be read as the number of a second tier of the kind.
_KIND = re.compile(r"[a-z][a-z0-9_]*")


@cache
def storage_kinds() -> tuple[str, ...]:
    """Return the names of all kinds of storage tiers: of this package, then of other packages."""
    added = {one.name for one in entry_points(group=ENTRY_POINTS) if _KIND.fullmatch(one.name)}
    # A name of this package's kinds stays this package's, whatever another package calls its own.
    return (*_SETTINGS, *sorted(added - {*TIER_KINDS}))


@cache
def settings_class(kind: str) -> type[StorageSettings]:
    """Return the settings class of a kind that `storage_kinds` names, or raise ConfigError."""
    if kind in _SETTINGS:
        return _SETTINGS[kind]
    found = list(entry_points(group=ENTRY_POINTS, name=kind))
    if len(found) != 1:
        packages = " and ".join(sorted(map(_package, found))) or "no package"
        raise ConfigError(
            f"the kind of tier {kind!r} is added by {packages}; install one package that adds it"
        )
    return _load(found[0])


def medium_of(name: str) -> Medium:
    """Return the medium of the tier with a given name.

    >>> medium_of("file.2")
    <Medium.DISK: 3>
    """
    kind = tier_kind(name)
    others = {PEER: Medium.PEER, HOST: Medium.HOST}
    return others[kind] if kind in others else settings_class(kind).medium


def _load(entry: EntryPoint) -> type[StorageSettings]:
    where = f"the kind of tier {entry.name!r} of package {_package(entry)}"
    try:
        loaded = entry.load()
    except Exception as error:  # code of another package may raise anything
        raise ConfigError(
            f"{where} cannot be loaded: {error!r}; install a release of it that works with this kvferry"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, StorageSettings)):
        raise ConfigError(f"{where} is {loaded!r}; it must be a subclass of StorageSettings")
    kind, medium = getattr(loaded, "kind", None), getattr(loaded, "medium", None)
    if kind != entry.name or not isinstance(medium, Medium):
        raise ConfigError(
            f"{where} has kind {kind!r} and medium {medium!r}; they must be {entry.name!r} and a Medium"
        )
    return loaded


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
