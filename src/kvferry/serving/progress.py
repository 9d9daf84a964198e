"""Show the progress of starting engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.serving.engine import EngineProcess, EngineState
from kvferry.serving.log_tail import last_line

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
            if self._shown.get(name) == (state, minutes):
                continue
            self._shown[name] = state, minutes
            if minutes:
                self._print(f"{name} still starting ({engine.seconds:.0f} s): {last_line(engine.log_path)}")
            else:
                self._print(
                    f"{name} {state} ({f'log: {engine.log_path}' if starting else f'{engine.seconds:.0f} s'})"
                )
        if not self._hinted and (hint := _hint(engines)):
            self._hinted = True
            self._print(hint)

    def _print(self, text: str) -> None:
        with suppress(OSError):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


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
