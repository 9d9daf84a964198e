"""All kinds of tiers. To add a kind of storage tier, add its settings class to `STORAGE_TIERS`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvferry.tiers.files.settings import FileSettings
from kvferry.tiers.names import HOST, PEER, Medium, tier_kind
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.storage_settings import StorageSettings

STORAGE_TIERS: Mapping[str, type[StorageSettings]] = MappingProxyType(
    {one.kind: one for one in (FileSettings, ObjectSettings)}
)
"""Settings class of each kind of storage tier, by name of the kind, in the order of display."""

TIER_KINDS = (PEER, HOST, *STORAGE_TIERS)
"""Names of all kinds of tiers, in the order of display."""


def medium_of(name: str) -> Medium:
    """Return the medium (peer, host, disk or network) of the tier with a given name.

    >>> medium_of("file.2")
    <Medium.DISK: 3>
    """
    kind = tier_kind(name)
    if kind in STORAGE_TIERS:
        return STORAGE_TIERS[kind].medium
    return {PEER: Medium.PEER, HOST: Medium.HOST}[kind]
