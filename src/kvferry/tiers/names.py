"""Names of tiers, and of the sources that KV can be loaded from, for messages, metrics and settings.

The first tier of a kind has the name of its kind, such as ``file``. Further ones are numbered: ``file.2``.
"""

from __future__ import annotations

from enum import Enum, auto

PEER = "peer"  # other engines, as a tier and as a source of KV
HOST = "host"
TIERS = "tiers"  # the source that loads from an engine's own tiers


class Medium(Enum):
    """The kind of storage that KV was loaded from, for engines that report loaded tokens by medium."""

    PEER = auto()
    HOST = auto()
    DISK = auto()
    NETWORK = auto()  # a store on other machines


def tier_name(kind: str, earlier: int) -> str:
    """Return the name of a tier that follows `earlier` tiers of its kind.

    >>> tier_name("file", 0), tier_name("file", 1)
    ('file', 'file.2')
    """
    return f"{kind}.{earlier + 1}" if earlier else kind


def tier_kind(name: str) -> str:
    """Return the kind of the tier with a given name.

    >>> tier_kind("file"), tier_kind("file.2")
    ('file', 'file')
    """
    return name.partition(".")[0]
