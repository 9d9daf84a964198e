"""Engines and a router whose terminal is closed. A script stands in the place of the engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.scripted_engines import alive, pids_of

pytestmark = pytest.mark.slow

SERVE = """
import sys
from pathlib import Path
from rich.console import Console
from kvferry.tools.serving.devices import listen
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.serve import serve_fleet
from kvferry.tools.serving.processes import StopSignals
from support.scripted_engines import Script
folder, port = sys.argv[1], int(sys.argv[2])
spec = Script(name="engine-0", role=Role.BOTH, model="m", port=port, folder=folder)
with StopSignals() as signals, listen("127.0.0.1", 0) as sock:
    serve_fleet([spec], sock, Path(folder, "logs"), Console(stderr=True), signals,
                announce=lambda line: print(line, flush=True), startup_timeout_seconds=60)
sys.exit(signals.exit_code)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path that is short enough for the sockets of engines."""
    with tempfile.TemporaryDirectory(prefix="hup-") as name:
        yield Path(name)


@contextmanager
def serving(
    folder: Path, port: int, hang_up: signal.Handlers = signal.SIG_DFL
) -> Iterator[subprocess.Popen[str]]:
    """Start a fleet with its temporary files in a folder, and wait until it serves.

    Args:
        folder: for all that the fleet writes.
        port: of the engine.
        hang_up: what the fleet is started to do on SIGHUP: `SIG_IGN` as under ``nohup``.
    """
    before = signal.signal(signal.SIGHUP, hang_up)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(folder), str(port)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)},
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    with process:
        try:
            assert process.stdout.readline().startswith("kvferry: serving on ")
            yield process
        finally:
            process.kill()


def test_hang_up_stops_the_engines_and_removes_their_folder(folder, reserved):
    with serving(folder, reserved()) as process:
        assert [*folder.glob("kvferry-*")]
        before = pids_of(folder, "engine-0")
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 129
    assert not [*folder.glob("kvferry-*")]
    assert not any(map(alive, before))


@pytest.mark.long
def test_hang_up_under_nohup_is_ignored(folder, reserved):
    with serving(folder, reserved(), signal.SIG_IGN) as process:
        process.send_signal(signal.SIGHUP)
        process.terminate()
        assert process.wait(60) == 0, "the exit code is that of the first signal that it did not ignore"
