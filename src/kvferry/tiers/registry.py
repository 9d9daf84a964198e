"""All kinds of tiers. A new kind of storage tier is one entry here."""

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
"""Kinds of storage tiers by name, in the order in which they are shown."""

TIER_KINDS = (PEER, HOST, *STORAGE_TIERS)
"""Names of the kinds of all tiers, in the order in which they are shown."""


def medium_of(name: str) -> Medium:
    """Return the medium of a tier by its name.

    >>> medium_of("file.2")
    <Medium.DISK: 3>
    """
    kind = tier_kind(name)
    if kind in STORAGE_TIERS:
        return STORAGE_TIERS[kind].medium
    return {PEER: Medium.PEER, HOST: Medium.HOST}[kind]
