"""Output of the demo to a terminal or a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from kvferry.report import Report
from kvferry.serving.demo.report import COLUMNS, LEGEND, RequestRow, failures, story, table_cells
from kvferry.serving.engine import EngineProcess
from kvferry.serving.progress import startup_progress
from kvferry.terminal import printable
from kvferry.units import format_seconds

_INDENT = "    "
_EXCERPT = 80
"""Width of the lines with prompts and answers where the output is no terminal."""


class Screen:
    """The demo's output. Prompts and answers are shortened to one line each."""

    def __init__(self, console: Console, width: int | None) -> None:
        """Create the output.

        Args:
            console: console to print to.
            width: maximum width of a line, in columns; None for no limit.
        """
        self._console = console
        self._report = Report(console, width)
        self._line = _EXCERPT if width is None else width

    def note(self, text: str) -> None:
        """Print a line."""
        for line in text.split("\n"):
            self._report.text(line)

    def model(self, title: str) -> None:
        """Print a heading with the name of the model that the next lines are about."""
        self._console.print()
        self._report.heading(title)

    @contextmanager
    def starting(self) -> Iterator[Callable[[Sequence[EngineProcess]], None]]:
        """Show the progress of starting engines during the ``with`` block, then print that they are ready.

        Yields:
            Function that takes the started engines and redraws their progress.
        """
        with startup_progress(self._console) as show:
            yield show
        self.note("Both engines are ready.")

    def handshake(self, seconds: float) -> None:
        """Print the first request's time to first token, which includes the engines' handshake.

        Args:
            seconds: time to first token, in seconds.
        """
        self.note(f"The engines met: the first request had its first token after {format_seconds(seconds)}.")

    def asked(self, number: int, prompt: str) -> None:
        """Print a prompt, cut to one line of the console.

        Args:
            number: number of the request, from 1.
            prompt: text of the prompt.
        """
        text, room = printable(prompt, " "), self._line - len(_INDENT) - 4
        self.note(f"\n{number:>3} {text if len(text) <= room else text[:room] + ' ...'}")

    @contextmanager
    def answering(self, who: str) -> Iterator[Callable[[str], None]]:
        """Yield a function that prints an answer after the name of the one who writes it.

        The answer is cut to one line of the console.

        Args:
            who: name of the writer.

        Yields:
            Function to call with each piece of the answer's text as it arrives.
        """
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
        """Print what happened, the result table, and a sentence for each request without a KV load.

        Args:
            rows: results in the order of the requests.
        """
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
