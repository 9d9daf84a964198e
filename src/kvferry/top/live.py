"""The live view: readings come in, keys are pressed, the screen follows."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

import anyio
from rich.console import Console

from kvferry.observe.fetch import client
from kvferry.top.book import Book
from kvferry.top.lines import screen
from kvferry.top.seen import Fleet
from kvferry.top.terminal import draw, keys, pressed

_LOOK_SECONDS = 0.1
"""How soon a change is drawn, of the terminal's size too."""


async def sampled(urls: Sequence[str], every: float) -> Fleet:
    """Two readings, so far apart."""
    async with client() as http:
        book = Book(http, urls, lambda: None)
        await book.read_once()
        await anyio.sleep(every)
        await book.read_once()
        return book.fleet()


class View:
    """What is shown: of all engines together, or of one of them.

    Attributes:
        chosen: place of that one in the list; None of all.
        done: it is left.
    """

    def __init__(self) -> None:
        self.chosen: int | None = None
        self.done = False

    def press(self, typed: str, engines: int) -> None:
        """Do what keys say: ``q`` ends, Tab goes to the next engine, Escape back to all."""
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
    """Show engines until somebody has had enough of them."""
    view = View()
    fd = sys.stdin.fileno()
    changed = anyio.Event()

    def touch() -> None:
        changed.set()

    async with client() as http, anyio.create_task_group() as group:
        book = Book(http, urls, touch)

        async def type_keys() -> None:
            while not view.done:
                await anyio.wait_readable(fd)
                typed = pressed(fd)
                view.press(typed or "q", len(book.fleet().engines))
                touch()

        async def hear_signals() -> None:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
                async for _ in signals:
                    view.done = True
                    touch()

        with keys(fd), console.screen():
            group.start_soon(hear_signals)
            group.start_soon(type_keys)
            group.start_soon(book.keep_reading, every, group)
            shape = None
            while not view.done:
                if changed.is_set() or console.size != shape:
                    changed = anyio.Event()
                    shape = console.size
                    now = book.fleet()
                    if view.chosen is not None and view.chosen >= len(now.engines):
                        view.chosen = None
                    draw(console, screen(now, *shape, chosen=view.chosen, every=every))
                with anyio.move_on_after(_LOOK_SECONDS):
                    await changed.wait()
            group.cancel_scope.cancel()
