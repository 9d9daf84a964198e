"""Fleets of scripts in the place of engines: real processes, real guards."""

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.serving.guard import STOP
from kvferry.tools.serving.launch import EngineSpec, EngineState, Fleet, LaunchError, Role
from support.clock import Clock
from support.scripted_engines import alive, pids_of
from support.waiting import wait_for

FAILS = "import sys; print('ValueError: no room'); sys.exit(3)"
REFUSES = "import sys; print('x.py: error: unrecognized arguments: --foo'); sys.exit(2)"
CORE_DIES = """
import os, subprocess, sys
core = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
code = subprocess.run([sys.executable, "-c", core]).returncode
print("RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore': %d}" % code)
"""
"""As vLLM: the API server ends with 0 after its core."""
SLEEPS = "import time; time.sleep(300)"
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("deaf", flush=True)
while True:
    time.sleep(300)
"""


def wait_until_logged(fleet: Fleet, word: str) -> None:
    wait_for(lambda: word in fleet.engines[0].log_path.read_text())


def test_log_that_cannot_be_written_is_one_sentence(tmp_path):
    Path(tmp_path, "prefill-0.log").mkdir()
    spec = EngineSpec(name="prefill-0", role=Role.PREFILL, model="m", port=1)
    with pytest.raises(LaunchError, match=r"the engines cannot be started: Is a directory .*--log-dir"):
        Fleet([spec], tmp_path).start()


def test_log_folder_is_private_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        with Fleet([], tmp_path / "logs"):
            assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_fleet_is_ready_when_every_engine_answers_and_leaves_no_process(tmp_path, script):
    specs = [script("prefill-0"), script("decode-0", role=Role.DECODE)]
    with Fleet(specs, tmp_path / "logs") as fleet:
        shown = []
        fleet.wait_ready(lambda engines: shown.append([engine.state for engine in engines]))
        assert shown[-1] == [EngineState.READY] * 2
        assert all(engine.log_path.stat().st_mode & 0o777 == 0o600 for engine in fleet.engines)
        assert fleet.prefill_urls == [specs[0].url]
        assert fleet.decode_urls == [specs[1].url]
        pids = pids_of(tmp_path, "prefill-0") + pids_of(tmp_path, "decode-0")
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (FAILS, LaunchError, "exit code 3: ValueError: no room"),
        (REFUSES, ConfigError, "exit code 2: unrecognized arguments: --foo"),
        ("import os; os.kill(os.getpid(), 9)", LaunchError, "signal 9 (SIGKILL) (log: "),
        (CORE_DIES, LaunchError, "signal 4 (SIGILL): Illegal instruction (log: "),
    ],
    ids=["fails", "refuses", "killed", "its core dies"],
)
def test_engine_that_exits_at_start_is_one_sentence_and_stops_the_others(tmp_path, script, code, error, said):
    specs = [script("prefill-0"), script("decode-0", code)]
    with pytest.raises(error) as caught, Fleet(specs, tmp_path) as fleet:
        fleet.wait_ready()
    assert str(caught.value).startswith(f"decode-0 ended with {said}")
    assert str(tmp_path / "decode-0.log") in str(caught.value)
    assert all(engine.state is EngineState.DEAD for engine in fleet.engines)


def test_a_processor_that_lacks_an_instruction_is_a_reason_for_another_dtype(tmp_path, script):
    with pytest.raises(LaunchError) as caught, Fleet([script(code=CORE_DIES)], tmp_path) as fleet:
        fleet.wait_ready()
    assert str(caught.value).endswith("; add --dtype float32 to the engine's arguments")


def test_engine_that_is_not_ready_in_time_is_an_error(tmp_path, script):
    clock = Clock()
    fleet = Fleet([script(code=SLEEPS)], tmp_path, startup_timeout_seconds=60, clock=clock)

    def advance(_) -> None:
        clock.now += 50

    with pytest.raises(LaunchError, match=r"prefill-0 is not ready after 60 s"), fleet:
        fleet.wait_ready(advance)
    assert clock.now == 100


def test_guard_kills_an_engine_that_ignores_sigterm_after_the_grace():
    reading, writing = os.pipe()
    guard = [sys.executable, "-m", "kvferry.tools.serving.guard", str(reading), "0.1"]
    command = [*guard, sys.executable, "-c", DEAF]
    with subprocess.Popen(command, pass_fds=[reading], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "deaf\n"
        os.write(writing, STOP)
        assert process.wait(60) == 128 + signal.SIGKILL
    os.close(reading)
    os.close(writing)


def test_kill_does_not_wait_for_the_grace(tmp_path, script):
    with Fleet([script(code=DEAF)], tmp_path, stop_timeout_seconds=3600) as fleet:
        wait_until_logged(fleet, "deaf")
        fleet.kill()
    assert fleet.engines[0].state is EngineState.DEAD


def test_interrupt_during_a_stop_kills_the_engines_and_is_raised(tmp_path, script):
    fleet = Fleet([script(code=DEAF)], tmp_path, stop_timeout_seconds=3600)
    fleet.start()
    wait_until_logged(fleet, "deaf")

    def interrupt() -> None:
        wait_until_logged(fleet, "asked")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            fleet.stop()
        assert fleet.engines[0].state is EngineState.DEAD
    finally:
        thread.join()
        fleet.kill()


def test_children_of_an_engine_that_died_are_ended(tmp_path, script):
    with Fleet([script()], tmp_path) as fleet:
        fleet.wait_ready()
        root, child = pids_of(tmp_path, "prefill-0")
        os.kill(root, signal.SIGKILL)
        wait_for(lambda: fleet.engines[0].poll() is EngineState.DEAD)
        assert fleet.engines[0].exit_code == -9
        assert not alive(child)


def test_engine_whose_guard_was_killed_is_dead_and_leaves_no_process_beside_its_restart(tmp_path, script):
    with Fleet([script()], tmp_path) as fleet:
        fleet.wait_ready()
        earlier = pids_of(tmp_path, "prefill-0")
        os.kill(fleet.engines[0].pid, signal.SIGKILL)
        wait_for(lambda: fleet.engines[0].poll() is EngineState.DEAD)
        wait_for(lambda: not any(map(alive, earlier)))
        fleet.restart(fleet.engines[0])
        fleet.wait_ready()
    assert not any(map(alive, pids_of(tmp_path, "prefill-0")))


def test_stop_ends_an_engine_whose_guard_was_killed(tmp_path, script):
    with Fleet([script()], tmp_path) as fleet:
        fleet.wait_ready()
        pids = pids_of(tmp_path, "prefill-0")
        os.kill(fleet.engines[0].pid, signal.SIGKILL)
    wait_for(lambda: not any(map(alive, pids)))


def test_engine_starts_from_a_process_with_more_than_1024_open_files(tmp_path, script):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with Fleet([script()], tmp_path) as fleet:
            fleet.wait_ready()
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_router_raises_its_limit_of_open_files():
    hard = min(2_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    code = "import resource, kvferry.tools.serving.run as run; run.raise_file_limit(); "
    code += "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    command = f"ulimit -Sn 300 && ulimit -Hn {hard} && exec '{sys.executable}' -c '{code}'"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(hard), str(hard)]


def test_engines_end_when_the_launcher_is_killed(tmp_path, reserved):
    launcher = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from support.scripted_engines import Script
from kvferry.tools.serving.launch import Fleet, Role
folder = {str(tmp_path)!r}
spec = Script(name="prefill-0", role=Role.PREFILL, model="m", port={reserved()}, folder=folder)
with Fleet([spec], Path(folder)) as fleet:
    fleet.wait_ready()
    print("ready", flush=True)
    time.sleep(300)
"""
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        pids = pids_of(tmp_path, "prefill-0")
        assert all(map(alive, pids))
        process.kill()
    wait_for(lambda: not any(map(alive, pids)))


def test_shared_memory_of_a_killed_engine_is_removed(tmp_path, script):
    code = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
open(sys.argv[3] + "/name", "w").write(memory.name)
time.sleep(300)
"""
    with Fleet([script(code=code)], tmp_path) as fleet:
        wait_for(lambda: (tmp_path / "name").exists() and (tmp_path / "name").read_text())
        segment = Path("/dev/shm") / (tmp_path / "name").read_text()
        assert segment.exists()
        fleet.kill()
    assert not segment.exists()
