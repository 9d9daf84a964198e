"""Passes over a trace in several processes: the same answers, errors in one sentence, an end with Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvferry.common.errors import ConfigError, KVFerryError
from kvferry.tools.cli.main import app
from kvferry.tools.replay import passes as module
from kvferry.tools.replay.passes import Passes
from kvferry.tools.replay.settings import ReplaySettings, parse_tier
from kvferry.tools.replay.trace.open import open_trace
from support.command_line import KVFERRY
from support.configs import DENSE
from support.small_replays import RECURRENT, UNIT, ListedTrace, ends_its_process, model, prompt
from support.waiting import wait_for

pytestmark = pytest.mark.slow
SETTINGS = ReplaySettings(tiers=(parse_tier("host=unlimited"),))
TABLE = ("--tier", "host=2MiB", "--engine-blocks", "0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("dense.json").write_text(json.dumps(DENSE))
    Path("recurrent.json").write_text(json.dumps(RECURRENT))
    rows = [f"{n / 10},{700 + 150 * (n % 7)},9,s{n % 23},t{n % 3}" for n in range(120)]
    Path("trace.csv").write_text("\n".join(["arrival,prompt_tokens,output_tokens,session,tenant", *rows]))
    return tmp_path


@pytest.fixture
def left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have other processes make all passes that are begun, and at once."""
    monkeypatch.setattr(module, "_HEAD_START_SECONDS", 0)
    monkeypatch.setattr(Passes, "result", lambda _, one: one.future.result())


def replay(*options: str) -> str:
    done = CliRunner().invoke(app, ["replay", "trace.csv", "--json", *options])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--model", "dense.json", *TABLE, "--curve", "--hint", "retain_seconds=60,priority=1"),
        ("--model", "dense.json", *TABLE, "--tenants", '{"t1": {"weight": 3}}', "--hint", "ends_session"),
        (
            "--model",
            "recurrent.json",
            *TABLE,
            "--tier",
            "file=40MiB",
            "--min-uses",
            "2",
            "--endurance",
            "1GB",
        ),
        ("--model", "recurrent.json", *TABLE, "--engines", "3", "--tier", "fleet", "--curve"),
        ("--model", "recurrent.json", "--engine-blocks", "0", "--target-hit", "0.3"),
    ],
)
def test_one_process_and_several_find_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, options: tuple[str, ...]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    alone = replay(*options)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert replay(*options) == alone
    request.getfixturevalue("left_to_others")
    assert replay(*options) == alone


def test_an_error_in_another_process_is_the_same_sentence(folder: Path, left_to_others: None) -> None:
    Path("bad.csv").write_text(Path("trace.csv").read_text() + "\n99,none,1,s,t\n")
    trace = ListedTrace(list)
    with Passes(trace, partial(open_trace, "bad.csv"), cores=2) as passes:
        one = passes.begin("pass", model(), SETTINGS)
        with pytest.raises(ConfigError, match=r"bad\.csv, line 122: "):
            passes.result(one)


def test_a_process_that_is_killed_is_told_in_a_sentence(left_to_others: None) -> None:
    with Passes(ListedTrace(list), partial(ListedTrace, ends_its_process), cores=2) as passes:
        one = passes.begin("without hints", model(), SETTINGS)
        with pytest.raises(
            KVFerryError, match=r"the pass 'without hints' died \(killed by signal 9\); if the m"
        ):
            passes.result(one)


def test_this_process_makes_all_passes_if_no_other_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEAD_START_SECONDS", 0)
    requests = [prompt(2 * UNIT, 1, 2), prompt(2 * UNIT, 1, 2)]
    trace = ListedTrace(lambda: requests)
    with Passes(trace, partial(open_trace, "missing.csv"), cores=3) as passes:
        begun = [passes.begin("pass", model(), SETTINGS) for _ in range(3)]
        wait_for(lambda: "replay-helper" not in {thread.name for thread in threading.enumerate()})
        assert [passes.result(one).results.hit_rate for one in begun] == [0.5] * 3


def _spawned(group: int) -> list[int]:
    """Return the ids of the processes that a command has started to make passes."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if os.getpgid(int(path.name)) == group and b"spawn_main" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def test_ctrl_c_ends_all_processes_and_prints_what_was_found_so_far(folder: Path) -> None:
    workload = "users=5000,requests-per-second=100,hours=50"
    command = [*KVFERRY, "replay", workload, "--model", "dense.json", "--hint", "store=false,start=4096"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
        cwd=folder,
    ) as process:
        try:
            for other in wait_for(partial(_spawned, process.pid)):
                # Else it would print a traceback, if it is not killed before.
                (blocked,) = re.findall(r"SigBlk:\s*(\w+)", Path(f"/proc/{other}/status").read_text())
                assert int(blocked, 16) & 1 << signal.SIGINT - 1
            os.killpg(process.pid, signal.SIGINT)
            output, errors = process.communicate()
            assert (process.returncode, errors) == (130, "")
            assert output.startswith("Interrupted: these are the numbers of the requests so far.")
            assert _spawned(process.pid) == []
        finally:
            process.kill()
