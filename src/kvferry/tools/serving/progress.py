"""Show the progress of starting engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.tools.serving.engine import EngineProcess, EngineState
from kvferry.tools.serving.launch import Fleet
from kvferry.tools.serving.log_tail import last_line
from kvferry.tools.serving.signals import StopSignals

_REMINDER_SECONDS = 60
_EAGER = "--enforce-eager"
_HINT = (
    "vLLM may be compiling the model, which takes minutes on a CPU; "
    f"with {_EAGER} it starts sooner and runs slower"
)

_COLOURS = {EngineState.STARTING: "yellow", EngineState.READY: "green", EngineState.DEAD: "red"}


@contextmanager
def startup_progress(console: Console) -> Iterator[Callable[[Sequence[EngineProcess]], None]]:
    """Yield a function that shows the states of engines while they start.

    On a terminal, it updates a live table, which disappears at the end of the ``with`` block. Elsewhere, it
    prints one line per change of state, and one per minute for an engine that is still starting. An engine
    that takes more than a minute and may be compiling gets a hint.
    """
    if not console.is_terminal:
        yield _Lines(console)
        return
    with Live(console=console, refresh_per_second=5, transient=True) as live:
        yield lambda engines: live.update(_live_view(engines))


class _Lines:
    """Function object that prints lines about engines that change their state or are still starting."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, tuple[EngineState, int]] = {}
        self._hinted = False

    def __call__(self, engines: Sequence[EngineProcess]) -> None:
        for engine in engines:
            name, state = engine.spec.name, engine.state
            starting = state is EngineState.STARTING
            minutes = int(engine.seconds // _REMINDER_SECONDS) if starting else 0
            # In a log file, a line five times a second would bury the others.
            if self._shown.get(name) == (state, minutes):
                continue
            self._shown[name] = state, minutes
            if minutes:
                text = f"{name} still starting ({engine.seconds:.0f} s): {last_line(engine.log_path)}"
            elif starting:
                text = f"{name} {state} (log: {engine.log_path})"
            else:
                text = f"{name} {state} ({engine.seconds:.0f} s)"
            show_notice(self._console, text)
        if not self._hinted and (hint := _hint(engines)):
            self._hinted = True
            show_notice(self._console, hint)


def show_notice(console: Console, text: str) -> None:
    """Print a message. Ignore write errors."""
    with suppress(OSError):  # a message that cannot be printed must not stop the server
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def wait_ready(fleet: Fleet, show: Callable[[Sequence[EngineProcess]], None], signals: StopSignals) -> None:
    """Show the states of engines until all are ready, or a signal has asked the process to stop."""

    def on_progress(engines: Sequence[EngineProcess]) -> None:
        signals.check()
        show(engines)

    fleet.wait_ready(on_progress)


def _hint(engines: Sequence[EngineProcess]) -> str:
    slow = (
        engine.state is EngineState.STARTING
        and engine.seconds >= _REMINDER_SECONDS
        and _EAGER not in engine.spec.arguments
        for engine in engines
    )
    return _HINT if any(slow) else ""


def _live_view(engines: Sequence[EngineProcess]) -> Group:
    hint = _hint(engines)
    return Group(_table(engines), *([Text(hint, "dim")] if hint else []))


def _table(engines: Sequence[EngineProcess]) -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(3):
        table.add_column(no_wrap=True)
    # A log line is longer than a terminal is wide.
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
