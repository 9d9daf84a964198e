"""Text that several reports share."""

from __future__ import annotations

from kvferry.measuring.spread import Spread
from kvferry.units import format_seconds

PLACES = {"host": "in host memory", "file": "in files"}
"""Where a prompt's chunks are, by tier."""


def verdict(*, reached: bool) -> str:
    """Return "reached" or "missed", coloured."""
    return "[green]reached[/]" if reached else "[red]missed[/]"


def seconds(spread: Spread) -> str:
    """Format a time with its range."""
    return f"{format_seconds(spread.median)} ({format_seconds(spread.low)}-{format_seconds(spread.high)})"
