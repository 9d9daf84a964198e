"""The live view: react to readings, keys and signals."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

import anyio
from rich.console import Console

from kvferry.observe.fetch import client
from kvferry.top.addresses import FleetView
from kvferry.top.lines import screen
from kvferry.top.poller import Poller
from kvferry.top.terminal import draw, raw_keys, read_keys

_LOOK_SECONDS = 0.1
"""Longest delay until a change, also of the terminal's size, is drawn."""


async def sampled(urls: Sequence[str], every: float) -> FleetView:
    """Return two readings `every` seconds apart."""
    async with client() as http:
        book = Poller(http, urls, lambda: None)
        await book.read_once()
        await anyio.sleep(every)
        await book.read_once()
        return book.fleet()


class View:
    """State of the selection. Mutable.

    Attributes:
        chosen: index of the engine shown in detail; None for all together.
        done: whether the user quit.
    """

    def __init__(self) -> None:
        self.chosen: int | None = None
        self.done = False

    def press(self, typed: str, engines: int) -> None:
        """Handle keys: ``q`` quits, Tab selects the next engine, Escape all engines."""
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
    """Show engines until the user quits."""
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
                view.press(typed or "q", len(book.fleet().engines))
                touch()

        async def hear_signals() -> None:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
                async for _ in signals:
                    view.done = True
                    touch()

        with raw_keys(fd), console.screen():
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
