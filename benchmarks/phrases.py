"""What several reports say in the same words."""

from __future__ import annotations

from kvferry.measuring.spread import Spread
from kvferry.plan.units import duration

PLACES = {"host": "in host memory", "file": "in files"}
"""Where a prompt's chunks are, by tier."""


def verdict(*, reached: bool) -> str:
    """As a console colours it."""
    return "[green]reached[/]" if reached else "[red]missed[/]"


def seconds(spread: Spread) -> str:
    """A time with its range."""
    return f"{duration(spread.median)} ({duration(spread.low)}-{duration(spread.high)})"
