"""Print text and tables that fit the width of the output, and have no limit where it is no terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from kvferry.table import Column, fit_table
from kvferry.terminal import output_width, printable, wrap

_BOLD, _DIM = "bold", "dim"


class Report:
    """A console, and the width that lines have at most."""

    def __init__(self, console: Console, width: int | None) -> None:
        """Create a report.

        Args:
            console: console to print to. Its own width is not used.
            width: maximum width of a line, in columns; None for no limit.
        """
        self.width = width
        self._console = console

    @classmethod
    def to_stdout(cls) -> Report:
        """Return a report to standard output. It has colours and a limited width only on a terminal."""
        return cls(Console(highlight=False), output_width())

    def text(self, text: str = "", style: str = "", *, indent: int = 0, hanging: int = 0) -> None:
        """Print a paragraph. Unprintable characters are replaced.

        Args:
            text: text of the paragraph; empty for a blank line.
            style: style of the text, as in `rich`.
            indent: indentation of every line, in columns.
            hanging: additional indentation of all lines except the first, in columns.
        """
        for line in wrap(printable(text), self.width, indent, hanging):
            self._line(line, style)

    def heading(self, text: str) -> None:
        """Print a line in bold."""
        self.text(text, _BOLD)

    def note(self, text: str) -> None:
        """Print a paragraph in dim colour."""
        self.text(text, _DIM)

    def table(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str]], *, last_is_total: bool = False
    ) -> None:
        """Print a table, and the headings of the columns that the width has no room for.

        Args:
            columns: columns of the table.
            rows: cells of each row, one per column.
            last_is_total: True to print the last row in bold.
        """
        fitted = fit_table(columns, rows, self.width)
        for line in fitted.head:
            self._line(line, _BOLD)
        for number, row in enumerate(fitted.rows):
            for line in row:
                self._line(line, _BOLD if last_is_total and number == len(rows) - 1 else "")
        if fitted.left_out:
            self.note(f"A wider terminal also shows: {', '.join(fitted.left_out)}.")

    def _line(self, line: str, style: str) -> None:
        self._console.print(Text(line, style), soft_wrap=True)
