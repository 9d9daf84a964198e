"""Texts and formats that several reports share."""

from __future__ import annotations

from kvferry.common.units import format_seconds
from kvferry.tools.measuring.rounds import Spread

PLACES = {"host": "in host memory", "file": "in files", "prefetched": "in files, prefetched"}
"""Descriptions of the place of a prompt's chunks, by tier."""


def verdict(*, reached: bool) -> str:
    """Return the result for a target as coloured text: "reached" or "missed"."""
    return "[green]reached[/]" if reached else "[red]missed[/]"


def seconds(spread: Spread) -> str:
    """Format the median of a time given in seconds, with its range."""
    return f"{format_seconds(spread.median)} ({format_seconds(spread.low)}-{format_seconds(spread.high)})"
