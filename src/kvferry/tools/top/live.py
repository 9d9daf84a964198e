"""Run the live view: draw the screen after each reading, and handle keys and signals."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio
from rich.console import Console
from rich.text import Text

from kvferry.common.machine import termios, tty
from kvferry.tools.fetch import client
from kvferry.tools.top.layout import TextLine
from kvferry.tools.top.lines import screen
from kvferry.tools.top.poller import FleetView, Poller

# Index of the control characters in what `termios.tcgetattr` returns.
_CC = 6


@contextmanager
def raw_keys(fd: int) -> Iterator[None]:
    """Switch a terminal to unbuffered input without echo until the ``with`` block ends."""
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        now = termios.tcgetattr(fd)
        # Disable Ctrl-Z, because it would suspend the program without restoring the screen.
        now[_CC][termios.VSUSP] = b"\0"
        termios.tcsetattr(fd, termios.TCSANOW, now)
        yield
    finally:
        # Drops keys that were not read, which the shell would get else.
        termios.tcsetattr(fd, termios.TCSAFLUSH, before)


def read_keys(fd: int) -> str:
    """Wait for input from the terminal `fd`, and return the typed keys; empty at the end of input."""
    try:
        return os.read(fd, 1024).decode(errors="ignore")
    except OSError:
        return ""


def draw(console: Console, lines: list[TextLine]) -> None:
    """Replace the content of the console's screen with these lines."""
    text = Text("\n", no_wrap=True, overflow="crop", end="").join(
        Text(line.text, style=line.look) for line in lines
    )
    console.update_screen(text)


# Longest delay until a change of the terminal's size is drawn.
_LOOK_SECONDS = 0.1


async def sample_fleet(urls: Sequence[str], every: float) -> FleetView:
    """Read the metrics of all engines twice, and return their state, with rates between the two readings."""
    async with client() as http:
        book = Poller(http, urls, lambda: None)
        await book.read_once()
        await anyio.sleep(every)
        await book.read_once()
        return book.fleet()


class View:
    """The state of the live view that the user changes with keys.

    Attributes:
        chosen: index of the engine that is shown in detail; None for all engines together.
    """

    def __init__(self) -> None:
        self.chosen: int | None = None
        self.done = False

    def press(self, typed: str, engines: int) -> None:
        """Handle typed keys: ``q`` quits, Tab selects the next engine, and Escape selects all engines."""
        for key in typed:
            if key in "qQ\x04":
                self.done = True
            elif key == "\t":
                self.chosen = 0 if self.chosen is None else self.chosen + 1
                if self.chosen >= engines:
                    self.chosen = None
            elif key == "\x1b":
                self.chosen = None


async def watch(urls: Sequence[str], every: float, console: Console) -> None:
    """Show the live view of engines until the user quits or a signal arrives."""
    view = View()
    fd = sys.stdin.fileno()
    changed = anyio.Event()

    def touch() -> None:
        changed.set()

    async with client() as http, anyio.create_task_group() as group:
        book = Poller(http, urls, touch)

        async def type_keys() -> None:
            while not view.done:
                await anyio.wait_readable(fd)
                typed = read_keys(fd)
                # A terminal that is closed sends no more keys, and nobody watches.
                view.press(typed or "q", len(book.fleet().engines))
                touch()

        async def handle_signals() -> None:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
                async for _ in signals:
                    view.done = True
                    touch()

        with raw_keys(fd), console.screen():
            group.start_soon(handle_signals)
            group.start_soon(type_keys)
            group.start_soon(book.keep_reading, every, group)
            shape = None
            while not view.done:
                if changed.is_set() or console.size != shape:
                    changed = anyio.Event()
                    shape = console.size
                    now = book.fleet()
                    # A router may list fewer engines by now.
                    if view.chosen is not None and view.chosen >= len(now.engines):
                        view.chosen = None
                    draw(console, screen(now, *shape, chosen=view.chosen, every=every))
                with anyio.move_on_after(_LOOK_SECONDS):
                    await changed.wait()
            group.cancel_scope.cancel()
