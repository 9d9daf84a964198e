"""Output of the demo to a terminal or a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from kvferry.report import Report
from kvferry.tools.serving.demo.report import COLUMNS, LEGEND, RequestRow, failures, story, table_cells
from kvferry.tools.serving.engine import EngineProcess
from kvferry.tools.serving.progress import startup_progress
from kvferry.terminal import printable
from kvferry.units import format_seconds

_INDENT = "    "
# Width of lines with prompts and answers where the output is no terminal.
_EXCERPT = 80


class Screen:
    """The demo's output. Prompts and answers are shortened to one line each."""

    def __init__(self, console: Console, width: int | None) -> None:
        self._console = console
        self._report = Report(console, width)
        self._line = _EXCERPT if width is None else width

    def note(self, text: str) -> None:
        for line in text.split("\n"):
            self._report.text(line)

    def model(self, title: str) -> None:
        """Print a heading with the name of the model that the next lines are about."""
        self._console.print()
        self._report.heading(title)

    @contextmanager
    def starting(self) -> Iterator[Callable[[Sequence[EngineProcess]], None]]:
        """Show the progress of starting engines during the ``with`` block, then print that they are ready."""
        with startup_progress(self._console) as show:
            yield show
        self.note("Both engines are ready.")

    def handshake(self, seconds: float) -> None:
        """Print the first request's time to first token, which includes the engines' handshake."""
        self.note(f"The engines met: the first request had its first token after {format_seconds(seconds)}.")

    def asked(self, number: int, prompt: str) -> None:
        """Print a prompt, cut to one line of the console."""
        text, room = printable(prompt, " "), self._line - len(_INDENT) - 4
        self.note(f"\n{number:>3} {text if len(text) <= room else text[:room] + ' ...'}")

    @contextmanager
    def answering(self, who: str) -> Iterator[Callable[[str], None]]:
        """Yield a function that prints an answer piece by piece, cut to one line of the console."""
        begin = f"{_INDENT}{who:<5}  "
        room = self._line - len(begin) - len("...")
        self._piece(begin)

        def on_text(text: str) -> None:
            nonlocal room
            if room > 0:
                piece = printable(text, " ")[:room]
                room -= len(piece)
                self._piece(piece if room > 0 else f"{piece}...")

        try:
            yield on_text
        finally:
            self._console.print()

    def results(self, rows: Sequence[RequestRow]) -> None:
        self._report.text()
        self._report.heading("What happened")
        self._report.text(story(rows))
        self._report.text()
        self._report.table(COLUMNS, table_cells(rows))
        self._report.text(LEGEND)
        for failure in failures(rows):
            self._report.text(failure)

    def _piece(self, text: str) -> None:
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()
