"""Start and stop several engines together.

    with Fleet(specs, log_dir) as fleet:
        fleet.wait_ready()
        ... requests to fleet.prefill_urls, fleet.decode_urls ...

When the ``with`` block has ended, also by an exception, all processes of all engines have ended. If this
process is killed, the guard of each engine (`kvferry.tools.serving.guard`) ends the engine.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.common.errors import ConfigError, KVFerryError
from kvferry.common.files import check_umask
from kvferry.tools.serving.engine import (
    EngineProcess,
    EngineSpec,
    EngineState,
    error_line,
    last_line,
    process_code,
)
from kvferry.tools.serving.machine_checks import REMEDY, signal_text
from kvferry.tools.serving.processes import StopSignals, compiled_code, temporary_for_engines
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.specs import fleet_specs

__all__ = ["EngineProcess", "EngineSpec", "EngineState", "Fleet", "LaunchError", "Role", "fleet_specs"]

_POLL_SECONDS = 0.2
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the kernel keeps it
# Exit code of argument parsers that refuse an argument.
_REFUSED_ARGUMENTS = 2
_REMINDER_SECONDS = 60
_EAGER = "--enforce-eager"
_HINT = (
    "vLLM may be compiling the model, which takes minutes on a CPU; "
    f"with {_EAGER} it starts sooner and runs slower"
)
_COLOURS = {EngineState.STARTING: "yellow", EngineState.READY: "green", EngineState.DEAD: "red"}

Progress = Callable[[Sequence[EngineProcess]], None]


class LaunchError(KVFerryError):
    """Raised if an engine does not start. If the engine ran, the message has the path of its log."""


class Fleet:
    """Several engines, as a context manager that starts them on entry and stops them on exit.

    Args:
        log_dir: folder for one log per engine, ``<name>.log``; created if it does not exist.
        stop_timeout_seconds: time that an engine has to end after SIGTERM, before it is killed.

    Attributes:
        engines: started engines in the order of their specifications; empty before `start`.
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        log_dir: Path,
        *,
        startup_timeout_seconds: float = 600.0,
        stop_timeout_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._specs = tuple(specs)
        self._log_dir = log_dir
        self._startup_timeout_seconds = startup_timeout_seconds
        self._stop_timeout_seconds = stop_timeout_seconds
        self.engines: tuple[EngineProcess, ...] = ()
        self._restarts = Counter[str]()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """Start every engine, and return before the engines are ready.

        Raises:
            ConfigError: the umask takes permissions from the owner of new files; the log folder or the
                temporary folder cannot be created; or the path of the temporary folder is too long.
            LaunchError: a log file or a process cannot be created.
        """
        check_umask()
        make_log_dir(self._log_dir)
        # vLLM leaves sockets and files in TMPDIR, so the engines get a TMPDIR that is removed with them.
        self._temporary = temporary_for_engines()
        # torch takes long to compile code for the first requests. Keep that code in torch's default folder,
        # because it would be lost in the temporary one.
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or compiled_code()
        own = {
            "TMPDIR": self._temporary.name,
            "TORCHINDUCTOR_CACHE_DIR": compiled,
            "PYTHONFAULTHANDLER": "1",  # a process that a signal such as SIGILL ends says so in its log
        }
        for spec in self._specs:
            placed = replace(spec, environment={**own, **spec.environment})
            try:
                engine = self._engine(placed, f"{spec.name}.log")
            except OSError as error:
                raise LaunchError(
                    f"the engines cannot be started: {error.strerror} ({error.filename}); free space or "
                    "memory, or name another --log-dir"
                ) from error
            self.engines = (*self.engines, engine)

    def _engine(self, spec: EngineSpec, log_name: str) -> EngineProcess:
        return EngineProcess(spec, self._log_dir / log_name, self._stop_timeout_seconds, self._clock)

    def wait_ready(self, on_progress: Progress = lambda _: None) -> None:
        """Wait until every engine is ready.

        If this raises, the other engines keep running until the ``with`` block ends.

        Args:
            on_progress: function that is called about five times a second with `engines`, after their states
                were updated.

        Raises:
            LaunchError: an engine ended, or was not ready in time.
            ConfigError: an engine ended because vLLM refused an argument.
        """
        while True:
            states = [engine.poll() for engine in self.engines]
            on_progress(self.engines)
            if all(state is EngineState.READY for state in states):
                return
            for engine in self.engines:
                if engine.state is EngineState.DEAD:
                    refused = engine.exit_code == _REFUSED_ARGUMENTS
                    raise (ConfigError if refused else LaunchError)(death_notice(engine))
                if self.is_late(engine):
                    raise LaunchError(
                        f"{engine.spec.name} is not ready after {self._startup_timeout_seconds:g} s; raise "
                        f"the startup timeout, or see {engine.log_path}"
                    )
            time.sleep(_POLL_SECONDS)

    def is_late(self, engine: EngineProcess) -> bool:
        late = engine.seconds > self._startup_timeout_seconds
        return late and engine.state is EngineState.STARTING

    def restart(self, engine: EngineProcess) -> None:
        """Start an engine that has ended again, with a new log. Replaces the engine in `engines`.

        Raises:
            LaunchError: the log file or the process cannot be created.
        """
        engine.finish_stop()
        name = engine.spec.name
        self._restarts[name] += 1
        try:
            again = self._engine(engine.spec, f"{name}.restart-{self._restarts[name]}.log")
        except OSError as error:
            raise LaunchError(
                f"{name} cannot be started again: {error.strerror} ({error.filename}); free space or memory"
            ) from error
        self.engines = tuple(again if one is engine else one for one in self.engines)

    @property
    def prefill_urls(self) -> list[str]:
        return [engine.spec.url for engine in self.engines if engine.spec.role is Role.PREFILL]

    @property
    def decode_urls(self) -> list[str]:
        """URLs of engines that decode."""
        return [engine.spec.url for engine in self.engines if engine.spec.role is not Role.PREFILL]

    def stop(self) -> None:
        """Stop every engine, and wait until all their processes have ended.

        A KeyboardInterrupt during the wait kills all engines, and is raised again afterwards.
        """
        for engine in self.engines:
            engine.begin_stop()
        try:
            for engine in self.engines:
                engine.finish_stop()
        except KeyboardInterrupt:
            self.kill()
            raise
        self._clean()

    def kill(self) -> None:
        for engine in self.engines:
            engine.kill()
        for engine in self.engines:
            engine.finish_stop()
        self._clean()

    def _clean(self) -> None:
        if self._temporary is not None:
            # Ranks on a CPU share memory that is named after a file here. vLLM does not remove it.
            for meeting in Path(self._temporary.name).glob("vllm_dist_*"):
                for segment in _SHARED_MEMORY.glob(f"{meeting.name}-*"):
                    segment.unlink(missing_ok=True)
            self._temporary.cleanup()
            self._temporary = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def make_log_dir(path: Path) -> None:
    """Create the logs' folder, for this user only, if it does not exist. Raise ConfigError if that fails."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {path} for the engines' logs: {error.strerror}; name another with "
            "--log-dir"
        ) from error


def death_notice(engine: EngineProcess) -> str:
    """Return a message about an engine that has ended: how, its last error, and the path of its log file."""
    # vLLM's API server ends with 0 when a process behind it has died.
    code = engine.exit_code or process_code(engine.log_path)
    error = error_line(engine.log_path)
    if not code:
        how = "" if error else ", because a process of it had ended"
    else:
        how = f" with {signal_text(-code)}" if code < 0 else f" with exit code {code}"
    why = f": {error}" if error else ""
    advice = f"; {REMEDY}" if "SIGILL" in how or error == "Illegal instruction" else ""
    return f"{engine.spec.name} ended{how}{why} (log: {engine.log_path}){advice}"


@contextmanager
def startup_progress(console: Console) -> Iterator[Progress]:
    """Yield a function that shows the states of engines while they start.

    On a terminal, it updates a live table, which disappears at the end of the ``with`` block. Elsewhere, it
    prints one line per change of state, and one per minute for an engine that is still starting. An engine
    that takes more than a minute and may be compiling gets a hint.
    """
    if not console.is_terminal:
        yield _Lines(console)
        return
    with Live(console=console, refresh_per_second=5, transient=True) as live:
        yield lambda engines: live.update(_table(engines))


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
        if not self._hinted and _may_compile(engines):
            self._hinted = True
            show_notice(self._console, _HINT)


def show_notice(console: Console, text: str) -> None:
    """Print a message. Ignore write errors."""
    with suppress(OSError):  # a message that cannot be printed must not stop the server
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def wait_ready(fleet: Fleet, show: Progress, signals: StopSignals) -> None:
    """Show the states of engines until all are ready, or a signal has asked the process to stop."""

    def on_progress(engines: Sequence[EngineProcess]) -> None:
        signals.check()
        show(engines)

    fleet.wait_ready(on_progress)


def _may_compile(engines: Sequence[EngineProcess]) -> bool:
    return any(
        engine.state is EngineState.STARTING
        and engine.seconds >= _REMINDER_SECONDS
        and _EAGER not in engine.spec.arguments
        for engine in engines
    )


def _table(engines: Sequence[EngineProcess]) -> Group:
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
    return Group(table, *([Text(_HINT, "dim")] if _may_compile(engines) else []))
