"""Show the progress of starting engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.serving.engine import EngineProcess, EngineState
from kvferry.serving.log_tail import last_line

_COLOURS = {EngineState.STARTING: "yellow", EngineState.READY: "green", EngineState.DEAD: "red"}


@contextmanager
def startup_progress(console: Console) -> Iterator[Callable[[Sequence[EngineProcess]], None]]:
    """Yield a function that shows the states of engines while they start.

    On a terminal, the function updates a live table, which disappears at the end of the ``with`` block.
    Elsewhere, the function prints one line per change of state.

    Args:
        console: console for the table or the lines.

    Yields:
        Function that takes the engines, and shows the states that they had at their last `poll`.
    """
    if not console.is_terminal:
        yield _Lines(console)
        return
    with Live(console=console, refresh_per_second=5, transient=True) as live:
        yield lambda engines: live.update(_table(engines))


class _Lines:
    """Function object that prints a line for each engine whose state has changed since the last call."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, EngineState] = {}

    def __call__(self, engines: Sequence[EngineProcess]) -> None:
        for engine in engines:
            name, state = engine.spec.name, engine.state
            if self._shown.get(name) is state:
                continue
            self._shown[name] = state
            more = f"log: {engine.log_path}" if state is EngineState.STARTING else f"{engine.seconds:.0f} s"
            with suppress(OSError):
                self._console.print(f"{name} {state} ({more})", markup=False, highlight=False, soft_wrap=True)


def _table(engines: Sequence[EngineProcess]) -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for engine in engines:
        starting = engine.state is EngineState.STARTING
        table.add_row(
            engine.spec.name,
            Text(engine.state, _COLOURS[engine.state]),
            f"{engine.seconds:.0f} s" if starting else "",
            Text(last_line(engine.log_path) if starting else "", "dim"),
        )
    return table
