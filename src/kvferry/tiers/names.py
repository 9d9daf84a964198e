"""Names of tiers and of sources of tokens, for messages, metrics and settings.

The second and later tiers of a kind are numbered: ``file.2``.
"""

from __future__ import annotations

from enum import Enum, auto

PEER = "peer"
"""Another engine, as a tier and as a source."""

HOST = "host"

TIERS = "tiers"
"""The source that loads from an engine's own tiers."""


class Medium(Enum):
    """The medium that tokens were loaded from, for engines that count tokens by medium."""

    PEER = auto()
    HOST = auto()
    DISK = auto()
    NETWORK = auto()  # a store on other machines


def tier_name(kind: str, before: int) -> str:
    """Return the name of a tier that follows `before` tiers of its kind.

    >>> tier_name("file", 0), tier_name("file", 1)
    ('file', 'file.2')
    """
    return f"{kind}.{before + 1}" if before else kind


def tier_kind(name: str) -> str:
    """Return the kind of a tier by its name.

    >>> tier_kind("file"), tier_kind("file.2")
    ('file', 'file')
    """
    return name.partition(".")[0]
