"""Restarts of engines that end while they serve. Scripts stand in the place of engines."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace

import pytest

from kvferry.tools.serving.engine import EngineState
from kvferry.tools.serving.launch import Fleet, Role
from kvferry.tools.serving.serve import FleetLost, RestartPolicy, Restarts, Supervisor
from support.clock import Clock
from support.scripted_engines import ENGINE, pids_of
from support.waiting import wait_for

QUICK = RestartPolicy(limit=2, first_seconds=0.05)


def test_wait_doubles_with_each_restart_until_the_limit():
    restarts = Restarts(RestartPolicy(limit=3, longest_seconds=3))
    assert [restarts.on_ended(10, 5) for _ in range(4)] == [1, 2, 3, None]


def test_engine_that_ran_for_long_has_all_its_restarts_again():
    restarts = Restarts(RestartPolicy(limit=1))
    assert [restarts.on_ended(0, ran) for ran in (5, 600, 5)] == [1, 1, None]


def test_killed_engine_is_started_again_until_no_engine_has_restarts_left(tmp_path, script):
    said: list[str] = []
    specs = [script("decode-0", role=Role.DECODE), script("decode-1", role=Role.DECODE)]
    with Fleet(specs, tmp_path) as fleet:
        fleet.wait_ready()
        supervisor = Supervisor(fleet, said.append, QUICK)

        def said_times(text: str) -> int:
            supervisor.check()
            return sum(text in line for line in said)

        def kill(name: str) -> None:
            os.kill(pids_of(tmp_path, name)[0], signal.SIGKILL)

        def kill_while_it_has_restarts(name: str) -> None:
            for restart in (1, 2):
                kill(name)
                wait_for(lambda times=restart: said_times(f"{name} is ready again after") == times)

        kill_while_it_has_restarts("decode-0")
        assert re.fullmatch(
            r"decode-0 ended with signal 9 \(SIGKILL\) \(log: .*decode-0\.log\); restart 1 of 2 in 50 ms; "
            r"1 of 2 engines with this role still run",
            said[0],
        )
        assert "decode-0.restart-1.log); restart 2 of 2 in 100 ms" in said[2]
        assert [engine.spec.name for engine in fleet.engines] == ["decode-0", "decode-1"]
        assert fleet.engines[1].poll() is EngineState.READY
        kill("decode-0")
        wait_for(lambda: said_times("after 2 restarts in a row, and has no restarts left") == 1)
        kill_while_it_has_restarts("decode-1")
        kill("decode-1")
        with pytest.raises(FleetLost, match=r"decode-1 ended with signal 9 .*after 2 restarts in a row, and"):
            wait_for(lambda: said_times("never") > 0)


def test_engine_that_is_late_after_a_restart_is_killed_and_uses_up_a_restart(tmp_path, script):
    was = f"{tmp_path}/was"
    hangs = f"import os, time\nif os.path.exists({was!r}): time.sleep(300)\nopen({was!r}, 'w')\n"
    said: list[str] = []
    clock = Clock()
    with Fleet([script("engine-0", hangs + ENGINE, Role.BOTH)], tmp_path, clock=clock) as fleet:
        fleet.wait_ready()
        # A start that hangs takes longer than an engine must run to begin a new row.
        supervisor = Supervisor(fleet, said.append, replace(QUICK, stable_seconds=600), clock)

        def check_later() -> None:
            supervisor.check()
            clock.now += 700

        os.kill(pids_of(tmp_path, "engine-0")[0], signal.SIGKILL)
        wait_for(lambda: fleet.engines[0].exit_code is not None)
        with pytest.raises(FleetLost, match="after 2 restarts"):
            wait_for(check_later)
    assert "restart 1 of 2" in said[0]
    assert "restart 2 of 2" in said[-1]


def test_restart_that_fails_uses_up_a_restart_and_other_engines_go_on(tmp_path, script):
    said: list[str] = []
    specs = [script("decode-0", role=Role.DECODE), script("decode-1", role=Role.DECODE)]
    with Fleet(specs, tmp_path) as fleet:
        fleet.wait_ready()
        (tmp_path / "decode-0.restart-1.log").mkdir()  # so the log cannot be created
        supervisor = Supervisor(fleet, said.append, QUICK)

        def ready_again() -> bool:
            supervisor.check()
            return any("decode-0 is ready again" in line for line in said)

        os.kill(pids_of(tmp_path, "decode-0")[0], signal.SIGKILL)
        wait_for(ready_again)
        assert fleet.engines[1].poll() is EngineState.READY
    assert "decode-0 cannot be started again: Is a directory" in said[1]
    assert "restart 2 of 2 in 100 ms; 1 of 2 engines" in said[1]
