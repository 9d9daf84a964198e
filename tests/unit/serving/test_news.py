"""News of engines is no condition of serving."""

from __future__ import annotations

import errno
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from kvferry.tools.serving.engine import EngineState
from kvferry.tools.serving.launch import show_notice, startup_progress


class Starting:
    """What is shown of an engine."""

    def __init__(self, log_path=Path("/log"), arguments=()):
        self.spec = SimpleNamespace(name="prefill-0", arguments=arguments)
        self.log_path, self.state, self.seconds = log_path, EngineState.STARTING, 0.0


class Full(StringIO):
    """Standard error of a service whose disk is full."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_notices_that_cannot_be_printed_stop_nothing():
    console = Console(file=Full())
    with pytest.raises(OSError, match="No space"):
        console.print("as it is")
    show_notice(console, "an engine has ended")
    with startup_progress(console) as show:
        show([Starting()])


@pytest.mark.parametrize("arguments", [(), ("--enforce-eager",)])
def test_an_engine_that_takes_minutes_is_reported_every_minute_with_a_hint(tmp_path, arguments):
    (log := tmp_path / "log").write_text("compiling\n")
    console, engine = Console(file=StringIO(), width=300), Starting(log, arguments)
    with startup_progress(console) as show:
        for engine.seconds in (0.0, 59.0, 60.2, 61.0, 120.2):
            show([engine])
        engine.state, engine.seconds = EngineState.READY, 130.0
        show([engine])
    first, *later = console.file.getvalue().splitlines()
    assert first == f"prefill-0 starting (log: {log})"
    hints = [line for line in later if "with --enforce-eager it starts sooner" in line]
    assert len(hints) == (not arguments)
    assert [line for line in later if line not in hints] == [
        "prefill-0 still starting (60 s): compiling",
        "prefill-0 still starting (120 s): compiling",
        "prefill-0 ready (130 s)",
    ]


def test_a_terminal_shows_the_hint_below_the_engines(tmp_path):
    engine = Starting(tmp_path / "log")
    engine.seconds = 61.0
    console = Console(file=StringIO(), width=120, force_terminal=True)
    with startup_progress(console) as show:
        show([engine])
    assert "may be compiling" in console.file.getvalue()
