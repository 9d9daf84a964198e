"""Print text and tables that fit the width of the output, and have no limit where it is no terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from kvferry.table import Column, fit_table
from kvferry.terminal import output_width, printable, wrap

_BOLD, _DIM = "bold", "dim"


class Report:
    """A console, and the maximum width of lines.

    Args:
        console: console to print to. Its own width is not used.
        width: columns; None for no limit.
    """

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
        """Print a paragraph in dim colour."""
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
