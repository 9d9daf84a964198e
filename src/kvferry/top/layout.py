"""Lines of text, of a given width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.cells import cell_len, chop_cells, set_cell_size

from kvferry.terminal import printable

MARGIN = 10
"""Where what is said of a heading begins, and the least that a name in a table has."""
_DOTS = ".."
_INDENT = "  "
_BREAKS = re.compile(r"(?<!\d) | (?![^\W\d])")
"""Where an item may be broken: a number stays with its unit."""


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


def row(name: str, cells: Sequence[str], columns: Sequence[Column], width: int, least: int = MARGIN) -> str:
    """A line of a table: a name with the room that is left, and cells of those first columns that fit.

    Args:
        name, cells: what stands in it.
        columns: of the table.
        width: in cells of the terminal.
        least: of these for the name.
    """
    numbers = ""
    for cell, column in zip(cells, columns, strict=True):
        if len(numbers) + column.width > width - least:
            break
        numbers += f"{cell:>{column.width}}"
    return set_cell_size(shortened(name, width - len(numbers)), max(0, width - len(numbers))) + numbers


def fit(text: str, width: int) -> str:
    """Cut, with dots, or filled up to exactly so many cells."""
    shown = printable(text)
    whole = set_cell_size(shown, width)
    if whole.rstrip() == shown.rstrip() or width <= len(_DOTS):
        return whole
    return set_cell_size(shown, width - len(_DOTS)) + _DOTS


def shortened(name: str, width: int) -> str:
    """A name, with dots in its middle if it is too long: of addresses both ends tell which one it is.

    >>> shortened("decode-0.kv.svc.cluster.local:8000", 20)
    'decode-0.kv...l:8000'
    """
    shown = printable(name)
    room = width - len(_DOTS)
    if cell_len(shown) <= width or room < 3:
        return set_cell_size(shown, max(0, min(width, cell_len(shown))))
    end = chop_cells(shown[::-1], room // 3)[0][::-1]
    return set_cell_size(shown, room - cell_len(end)) + _DOTS + end


def wrapped(heading: str, items: Iterable[str], width: int) -> Iterator[str]:
    """Items, as many in a line as there is room for; the first line begins with the heading.

    >>> list(wrapped("peers", ["plan 1.5 ms", "read 17.5 ms, p99 24.9 ms"], 33))
    ['peers     plan 1.5 ms', '          read 17.5 ms, p99', '          24.9 ms']
    """
    line, empty = fit(heading, MARGIN), True
    for item in (piece for each in items for piece in _pieces(printable(each), width - MARGIN)):
        if not empty and cell_len(line) + 2 + cell_len(item) > width:
            yield line
            line, empty = " " * MARGIN, True
        line += item if empty else f"  {item}"
        empty = False
    if not empty:
        yield line


def broken(text: str, width: int) -> list[str]:
    """All of it, in as many lines as that takes."""
    first, *others = _pieces(printable(text), width - len(_INDENT))
    return [first, *(f"{_INDENT}{each}" for each in others)]


def _pieces(item: str, room: int) -> Iterator[str]:
    """The item, or as many of its words at a time as there is room for; no word is longer."""
    piece = ""
    for word in (part for each in _BREAKS.split(item) for part in chop_cells(each, max(room, 2)) or [each]):
        if piece and cell_len(f"{piece} {word}") > room:
            yield piece
            piece = word
        else:
            piece = f"{piece} {word}" if piece else word
    yield piece
