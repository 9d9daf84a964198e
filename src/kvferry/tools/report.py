"""Reports for people: wrapped prose and tables that fit the width of a terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console
from rich.text import Text

from kvferry.common.text import printable

# Of prose, in columns.
_WIDEST, _NARROWEST = 80, 40
# Spaces at which a line may end: a number and its unit stay together.
_BREAKS = re.compile(r"(?<!\d) | (?![^\W\d]|%)")
# A wide character takes two cells.
_LEAST_ROOM = 2
_GAP = "  "
DOTS = ".."
"""Stand for text that is left out."""
_TALLEST_HEAD = 4
_BOLD, _DIM = "bold", "dim"


def wrap(text: str, width: int | None, indent: int = 0, hanging: int = 0) -> list[str]:
    r"""Split a text into lines of at most `width` terminal cells, at spaces, and words that are longer.

    A number stays with the word after it. An empty text gives one empty line, a `width` of None a single
    line. `hanging` is additional indentation of all lines except the first.

    >>> wrap("read 2.69 MiB in 3.7 ms", 12)
    ['read', '2.69 MiB in', '3.7 ms']
    """
    if width is None:
        return [" " * indent + text]
    room = max(width - indent - hanging, _LEAST_ROOM)
    lines, line, begun = list[str](), " " * indent, False
    for word in _BREAKS.split(text.rstrip()):
        parts = [word]
        if cell_len(word) > room:
            # It fills the rest of this line, and further lines.
            free = width - cell_len(line) - begun
            head = chop_cells(word, free if free > 0 else room)[0]
            parts = [head, *chop_cells(word.removeprefix(head), room)]
        for part in parts:
            if line.strip() and cell_len(f"{line} {part}") > width:
                lines.append(line.rstrip())
                line, begun = " " * (indent + hanging), False
            line += f" {part}" if begun else part
            begun = begun or bool(part) or not lines  # spaces begin a text, but no further line
    return [*lines, line.rstrip()]


def wrapped(text: str, indent: int = 0, hanging: int = 0) -> list[str]:
    """Wrap a text as `wrap` does to `report_width`, and replace unprintable characters."""
    return wrap(printable(text), report_width(), indent, hanging)


def report_width() -> int | None:
    """Return the width of prose in columns: from 40 to 80, or None for no limit."""
    width = output_width()
    return None if width is None else max(_NARROWEST, min(_WIDEST, width))


def output_width() -> int | None:
    """Return the columns of standard output by ``COLUMNS`` or the terminal; None without a terminal."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or _WIDEST
    except (AttributeError, OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        heading: heading in whole words. It may be split at its spaces.
        rank: 0 for a column that is always shown. Of the others, those with the highest rank are left out
            first, and of equal ranks the last one.
        left: True for left-aligned text, False for right-aligned numbers.
        minimum: minimum width in terminal cells, so that a table that is drawn again does not jump.
        least: width to which names in this column may be shortened in the middle, in terminal cells; None for
            text that is never shortened.
    """

    heading: str
    rank: int = 0
    left: bool = False
    minimum: int = 0
    least: int | None = None


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table as lines of text.

    Attributes:
        head: lines of the headings; empty if the width is so small that every row names its numbers.
        rows: lines of each row. A row has several lines if a cell has, or if the width is very small.
        left_out: headings of the columns that the width has no room for.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        return [*self.head, *(line for row in self.rows for line in row)]


def fit_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None, *, tall: bool = True
) -> FittedTable:
    r"""Lay out a table as lines of at most `width` terminal cells.

    Columns are left out until the table fits. If even the columns of rank 0 do not fit, each row is a line
    with its first cell, and below it the other cells, each after its heading.

    Args:
        rows: cells of each row, one per column. A cell may have several lines. An empty cell is shown as
            ``-``, so that a program can count fields.
        width: width in terminal cells; None for a table without limit, with one line per row.
        tall: True if headings may be split over several lines.

    >>> columns = Column("kind", left=True), Column("bytes moved"), Column("run length", rank=1)
    >>> rows = [("window", "64 KiB", "2 KiB"), ("full", "512 KiB", "16 KiB")]
    >>> print(*fit_table(columns, rows, 24).lines, sep="\n")
              bytes     run
    kind      moved  length
    window   64 KiB   2 KiB
    full    512 KiB  16 KiB
    >>> print(*fit_table(columns, rows, None).lines, sep="\n")
    kind    bytes moved  run length
    window       64 KiB       2 KiB
    full        512 KiB      16 KiB
    >>> print(*fit_table(columns, rows, 15).lines, sep="\n")
              bytes
    kind      moved
    window   64 KiB
    full    512 KiB
    """
    between = ", " if width is None else "\n"
    cells = [[(cell or "-").replace("\n", between).split("\n") for cell in row] for row in rows]
    whole = [
        max([column.minimum, *(cell_len(line) for row in cells for line in row[i])])
        for i, column in enumerate(columns)
    ]
    bodies = [
        body if column.least is None else min(body, column.least)
        for column, body in zip(columns, whole, strict=True)
    ]
    shown = [*range(len(columns))]
    heights = range(1, _TALLEST_HEAD + 1) if tall and width is not None else [1]
    while not (
        fitting := [h for h in heights if width is None or _total(columns, bodies, shown, h) <= width]
    ):
        droppable = [i for i in shown if columns[i].rank]
        if not droppable:
            return _stacked(columns, cells, width or 0)
        shown.remove(max(droppable, key=lambda i: (columns[i].rank, i)))
    widths = [
        max(body, _heading_width(column, fitting[0])) for column, body in zip(columns, bodies, strict=True)
    ]
    room = None if width is None else width - _total(columns, bodies, shown, fitting[0])
    for i in shown:
        if columns[i].least is not None:
            more = whole[i] - widths[i] if room is None else min(room, whole[i] - widths[i])
            widths[i] += max(0, more)
            for row in cells:
                row[i] = [shortened(line, widths[i]) for line in row[i]]
    headings = [_split(column.heading, wide) for column, wide in zip(columns, widths, strict=True)]
    height = max(len(headings[i]) for i in shown)
    headings = [[""] * (height - len(lines)) + lines for lines in headings]

    def line_up(row: Sequence[Sequence[str]]) -> tuple[str, ...]:
        return tuple(_lines(columns, widths, shown, row))

    left_out = tuple(column.heading for i, column in enumerate(columns) if i not in shown)
    return FittedTable(line_up(headings), tuple(map(line_up, cells)), left_out)


def shortened(name: str, width: int) -> str:
    """Shorten a name to at most `width` terminal cells. Dots replace the middle of a long name.

    >>> shortened("decode-0.kv.svc.cluster.local:8000", 20)
    'decode-0.kv...l:8000'
    """
    shown = printable(name)
    room = width - len(DOTS)
    if cell_len(shown) <= width or room < 3:
        return set_cell_size(shown, max(0, min(width, cell_len(shown))))
    # Both ends are kept, because addresses may differ in either.
    end = chop_cells(shown[::-1], (room + 1) // 3)[0][::-1]
    return set_cell_size(shown, room - cell_len(end)) + DOTS + end


def _split(heading: str, width: int) -> list[str]:
    """Split a heading at spaces into lines of at most `width` cells, or of a word that is longer."""
    lines: list[str] = []
    for word in heading.split():
        if lines and cell_len(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _heading_width(column: Column, height: int) -> int:
    """Return the smallest width at which a heading has at most `height` lines, without splitting a word."""
    longest = max(map(cell_len, column.heading.split()))
    widths = range(longest, cell_len(column.heading) + 1)
    return next(width for width in widths if len(_split(column.heading, width)) <= height)


def _total(columns: Sequence[Column], bodies: Sequence[int], shown: Sequence[int], height: int) -> int:
    widths = [max(bodies[i], _heading_width(columns[i], height)) for i in shown]
    return sum(widths) + len(_GAP) * (len(shown) - 1)


def _lines(
    columns: Sequence[Column], widths: Sequence[int], shown: Sequence[int], row: Sequence[Sequence[str]]
) -> Iterator[str]:
    for number in range(max(len(row[i]) for i in shown)):
        texts = []
        for i in shown:
            text = row[i][number] if number < len(row[i]) else ""
            blank = " " * (widths[i] - cell_len(text))
            texts.append(text + blank if columns[i].left else blank + text)
        yield _GAP.join(texts).rstrip()


def _stacked(columns: Sequence[Column], cells: Sequence[Sequence[Sequence[str]]], width: int) -> FittedTable:
    """Return a table without a line of headings. Each row is its first cell, then its numbers by name."""
    needed = [i for i, column in enumerate(columns) if not column.rank]
    rows = []
    for row in cells:
        lines = [line for text in row[needed[0]] for line in wrap(text, width)]
        for i in needed[1:]:
            lines += wrap(f"{columns[i].heading} {', '.join(row[i])}", width, len(_GAP), len(_GAP))
        rows.append(tuple(lines))
    return FittedTable((), tuple(rows), tuple(column.heading for column in columns if column.rank))


class Report:
    """A console whose own width is not used, and the maximum columns of lines; None for no limit."""

    def __init__(self, console: Console, width: int | None) -> None:
        self.width = width
        self._console = console

    @classmethod
    def to_stdout(cls) -> Report:
        """Return a report to standard output. It has colours and a limited width only on a terminal."""
        return cls(Console(highlight=False), output_width())

    def text(self, text: str = "", style: str = "", *, indent: int = 0, hanging: int = 0) -> None:
        """Print a paragraph in a style of `rich`. Unprintable characters are replaced.

        `hanging` is additional indentation of all lines except the first.
        """
        for line in wrap(printable(text), self.width, indent, hanging):
            self._line(line, style)

    def heading(self, text: str) -> None:
        self.text(text, _BOLD)

    def note(self, text: str) -> None:
        self.text(text, _DIM)

    def table(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str]], *, last_is_total: bool = False
    ) -> None:
        """Print a table, and the headings of the columns that the width has no room for."""
        fitted = fit_table(columns, rows, self.width)
        for line in fitted.head:
            self._line(line, _BOLD)
        for number, row in enumerate(fitted.rows):
            for line in row:
                self._line(line, _BOLD if last_is_total and number == len(rows) - 1 else "")
        if fitted.left_out:
            self.note(f"A wider terminal also shows: {', '.join(fitted.left_out)}.")

    def _line(self, line: str, style: str) -> None:
        # rich would wrap at the width of its own console.
        self._console.print(Text(line, style), soft_wrap=True)
