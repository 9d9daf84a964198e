"""Lay out text as lines of a given width in terminal cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.cells import cell_len, chop_cells, set_cell_size

from kvferry.terminal import printable

MARGIN = 10
"""Width of headings, and minimum width of names in tables, in cells."""
_DOTS = ".."
_INDENT = "  "
_BREAKS = re.compile(r"(?<!\d) | (?![^\W\d])")
"""Pattern of the spaces where an item may be broken. A number and its unit stay together."""


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


@dataclass(frozen=True, slots=True)
class Column:
    """A right-aligned column of a table.

    Attributes:
        head: text of the heading.
        width: width in terminal cells, including the space before the column.
    """

    head: str
    width: int


def row(name: str, cells: Sequence[str], columns: Sequence[Column], width: int, least: int = MARGIN) -> str:
    """Return a row of a table as text. The last columns are left out if the row has no room for them.

    Args:
        name: text of the first column.
        cells: texts of the other columns.
        columns: headings and widths of the other columns.
        width: width of the row, in terminal cells.
        least: minimum width of the first column, in terminal cells.
    """
    numbers = ""
    for cell, column in zip(cells, columns, strict=True):
        if len(numbers) + column.width > width - least:
            break
        numbers += f"{cell:>{column.width}}"
    return set_cell_size(shortened(name, width - len(numbers)), max(0, width - len(numbers))) + numbers


def fit(text: str, width: int) -> str:
    """Return the text, cut or padded with spaces to a width of exactly `width` terminal cells."""
    shown = printable(text)
    whole = set_cell_size(shown, width)
    if whole.rstrip() == shown.rstrip() or width <= len(_DOTS):
        return whole
    return set_cell_size(shown, width - len(_DOTS)) + _DOTS


def shortened(name: str, width: int) -> str:
    """Shorten a name to at most `width` terminal cells. Dots replace the middle of a long name.

    The start and the end of the name are kept, because addresses may differ in either.

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
    """Arrange items side by side in lines of at most `width` terminal cells, and yield the lines.

    The first line begins with the heading, and the others are indented. An item that is longer than a line is
    split at spaces.

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
    """Split a text into lines of at most `width` terminal cells. All lines except the first are indented."""
    first, *others = _pieces(printable(text), width - len(_INDENT))
    return [first, *(f"{_INDENT}{each}" for each in others)]


def _pieces(item: str, room: int) -> Iterator[str]:
    """Split `item` into pieces of at most `room` terminal cells, at spaces if possible, and yield them."""
    piece = ""
    for word in (part for each in _BREAKS.split(item) for part in chop_cells(each, max(room, 2)) or [each]):
        if piece and cell_len(f"{piece} {word}") > room:
            yield piece
            piece = word
        else:
            piece = f"{piece} {word}" if piece else word
    yield piece
