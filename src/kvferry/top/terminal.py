"""A terminal in raw mode, restored on every exit."""

from __future__ import annotations

import os
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from kvferry.top.layout import TextLine

_CC = 6


@contextmanager
def raw_keys(fd: int) -> Iterator[None]:
    """Read keys without echo and Enter inside the block."""
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        now = termios.tcgetattr(fd)
        # Ctrl-Z would leave the screen as drawn.
        now[_CC][termios.VSUSP] = b"\0"
        termios.tcsetattr(fd, termios.TCSANOW, now)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSAFLUSH, before)


def read_keys(fd: int) -> str:
    """Return the keys typed since the last call; empty at the end of input."""
    try:
        return os.read(fd, 1024).decode(errors="ignore")
    except OSError:
        return ""


def draw(console: Console, lines: list[TextLine]) -> None:
    """Fill the screen with the lines."""
    text = Text("\n", no_wrap=True, overflow="crop", end="").join(
        Text(line.text, style=line.look) for line in lines
    )
    console.update_screen(text)
