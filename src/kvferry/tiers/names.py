"""What messages, metrics and settings call the places that tokens come from, and the sources that offer them.

Of several tiers of a kind, the second and later have their number behind it: ``file.2``.
"""

from __future__ import annotations

PEER = "peer"
"""Another engine: a place, and the source that it is."""

HOST, FILE, OBJECT = "host", "file", "object"

TIERS = "tiers"
"""The source that is an engine's own tiers."""

TIER_KINDS = (PEER, HOST, FILE, OBJECT)
"""Kinds of them, in the order in which they are shown."""


def tier_name(kind: str, before: int) -> str:
    """The name of a tier before which there are so many of its kind.

    >>> numbered("file", 0), numbered("file", 1)
    ('file', 'file.2')
    """
    return f"{kind}.{before + 1}" if before else kind


def tier_kind(place: str) -> str:
    """What kind of place it is.

    >>> kind_of("file"), kind_of("file.2")
    ('file', 'file')
    """
    return place.partition(".")[0]
