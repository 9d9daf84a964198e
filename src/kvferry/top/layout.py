"""Lines of text, of a given width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.cells import cell_len, set_cell_size

from kvferry.terminal import printable

MARGIN = 10
"""Where what is said of a heading begins."""


class Look(StrEnum):
    """Of a line, where there is colour; what it says, it says without."""

    PLAIN = ""
    TITLE = "bold"
    HEAD = "dim"
    BAD = "bold red"
    CHOSEN = "reverse"


@dataclass(frozen=True, slots=True)
class Line:
    """One of them."""

    text: str
    look: Look = Look.PLAIN


@dataclass(frozen=True, slots=True)
class Column:
    """Of a table: its heading, and how many cells wide; numbers stand at its right end."""

    head: str
    width: int


def row(name: str, cells: Sequence[str], columns: Sequence[Column], width: int) -> str:
    """A line of a table: a name with the room that is left, and cells of these columns."""
    numbers = "".join(f"{cell:>{column.width}}" for cell, column in zip(cells, columns, strict=True))
    return fit(name, max(0, width - len(numbers))) + numbers


def fit(text: str, width: int) -> str:
    """Cut, with dots, or filled up to exactly so many cells."""
    shown = printable(text)
    whole = set_cell_size(shown, width)
    return whole if whole.rstrip() == shown.rstrip() or width < 3 else set_cell_size(shown, width - 2) + ".."


def wrapped(heading: str, items: Iterable[str], width: int) -> Iterator[str]:
    """Items, as many in a line as there is room for; the first line begins with the heading."""
    line, empty = fit(heading, MARGIN), True
    for item in map(printable, items):
        if not empty and cell_len(line) + 2 + cell_len(item) > width:
            yield line
            line, empty = " " * MARGIN, True
        line += item if empty else f"  {item}"
        empty = False
        if cell_len(line) > width:
            line = fit(line, width)
    if not empty:
        yield line
