"""Lay out text as lines of a given width in terminal cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from rich.cells import cell_len, set_cell_size

from kvferry.common.text import printable
from kvferry.tools.report import DOTS, wrap

# Width of headings, in cells.
MARGIN = 10
_STEPS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_EXACT = 10_000


class TextStyle(StrEnum):
    """The style of a line on a colour terminal, as a style string of `rich`."""

    PLAIN = ""
    TITLE = "bold"
    HEAD = "dim"
    BAD = "bold red"
    CHOSEN = "reverse"


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line of text and its style."""

    text: str
    look: TextStyle = TextStyle.PLAIN


def fit(text: str, width: int) -> str:
    """Return the text, cut or padded with spaces to a width of exactly `width` terminal cells."""
    shown = printable(text)
    whole = set_cell_size(shown, width)
    if whole.rstrip() == shown.rstrip() or width <= len(DOTS):
        return whole
    return set_cell_size(shown, width - len(DOTS)) + DOTS


def arrange(heading: str, items: Iterable[str], width: int | None) -> Iterator[str]:
    """Arrange items side by side in lines of at most `width` terminal cells, and yield the lines.

    The first line begins with the heading, and the others are indented. An item that is longer than a line is
    split at spaces.

    >>> list(arrange("peers", ["plan 1.5 ms", "read 17.5 ms, p99 24.9 ms"], 33))
    ['peers     plan 1.5 ms', '          read 17.5 ms, p99', '          24.9 ms']
    """
    line, empty = fit(heading, MARGIN), True
    room = None if width is None else width - MARGIN
    for item in (line for each in items for line in wrap(printable(each), room)):
        if width is not None and not empty and cell_len(line) + 2 + cell_len(item) > width:
            yield line
            line, empty = " " * MARGIN, True
        line += item if empty else f"  {item}"
        empty = False
    if not empty:
        yield line


def without_end(line: str, width: int) -> str:
    """Replace the end of a line by dots, to at most `width` terminal cells."""
    dots = f" {DOTS}"
    # Cut between items, or else between words, so that no number is cut.
    for gap in ("  ", " "):
        kept = line.rstrip()
        while kept and cell_len(kept) > width - len(dots):
            kept = kept.rpartition(gap)[0].rstrip()
        if kept:
            return kept + dots
    return fit(line, width)


def number(value: float | None) -> str:
    """Format a count or a rate: ``0``, ``0.4``, ``123``, ``9,876``, ``12.3k``; a dash for None.

    >>> [number(each) for each in (None, 0, 0.04, 3.14, 123.4, 9876, 12345, 2.5e6)]
    ['-', '0', '0.04', '3.1', '123', '9,876', '12.3k', '2.5M']
    """
    if value is None:
        return "-"
    if value >= _EXACT:
        each, unit = next((each, unit) for each, unit in _STEPS if value >= each)
        return f"{value / each:.1f}{unit}"
    # Rates of a few per second need a decimal, and counts have none.
    if value >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"


def percent(share: float | None) -> str:
    """Format a share from 0 to 1 as a percentage such as ``97%``; a dash for None."""
    return "-" if share is None else f"{share:.0%}"
