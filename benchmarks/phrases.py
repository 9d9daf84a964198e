"""What several reports say in the same words."""

from __future__ import annotations

from kvferry.measuring.spread import Spread
from kvferry.units import format_seconds

PLACES = {"host": "in host memory", "file": "in files"}
"""Where a prompt's chunks are, by tier."""


def verdict(*, reached: bool) -> str:
    """As a console colours it."""
    return "[green]reached[/]" if reached else "[red]missed[/]"


def seconds(spread: Spread) -> str:
    """A time with its range."""
    return f"{format_seconds(spread.median)} ({format_seconds(spread.low)}-{format_seconds(spread.high)})"
