"""A terminal that is drawn on: keys come one by one, and it is left as it was found, whatever happens."""

from __future__ import annotations

import os
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from kvferry.top.layout import Line

_CC = 6


@contextmanager
def keys(fd: int) -> Iterator[None]:
    """Keys are not shown and need no Enter; Ctrl-Z does nothing, as the screen would stay as drawn."""
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        now = termios.tcgetattr(fd)
        now[_CC][termios.VSUSP] = b"\0"
        termios.tcsetattr(fd, termios.TCSANOW, now)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSAFLUSH, before)


def pressed(fd: int) -> str:
    """What was typed since the last look; empty if nothing more can come."""
    try:
        return os.read(fd, 1024).decode(errors="ignore")
    except OSError:
        return ""


def draw(console: Console, lines: list[Line]) -> None:
    """Fill the screen with these."""
    text = Text("\n", no_wrap=True, overflow="crop", end="").join(
        Text(line.text, style=line.look) for line in lines
    )
    console.update_screen(text)
