"""Fleets of scripts in the place of engines: real processes, real guards."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.serving.launch import EngineProcess, EngineSpec, EngineState, Fleet, LaunchError, Role
from support.scripted_engines import alive, pids_of

# Tests beside it would take ports that were found free.
pytestmark = pytest.mark.alone

FAILS = "import sys; print('ValueError: no room'); sys.exit(3)"
REFUSES = "import sys; print('x.py: error: unrecognized arguments: --foo'); sys.exit(2)"
SLEEPS = "import time; time.sleep(300)"
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(300)
"""


@pytest.fixture
def deaf(eventually):
    """Waits until a DEAF script of this fleet is."""

    def wait(fleet: Fleet) -> None:
        eventually(lambda: "deaf" in fleet.engines[0].log_path.read_text())

    return wait


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path):
    Path(tmp_path, "prefill-0.log").mkdir()
    spec = EngineSpec(name="prefill-0", role=Role.PREFILL, model="m", port=1)
    with pytest.raises(LaunchError, match=r"the engines cannot be started: Is a directory .*--log-dir"):
        Fleet([spec], tmp_path).start()


def test_only_the_user_may_enter_the_folder_of_the_logs_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        with Fleet([], tmp_path / "logs"):
            assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_fleet_is_ready_when_every_engine_answers_and_leaves_nothing(tmp_path, script):
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
        ("import os; os.kill(os.getpid(), 9)", LaunchError, "signal 9"),
    ],
    ids=["fails", "refuses", "killed"],
)
def test_an_engine_that_dies_at_start_is_one_sentence_and_ends_the_others(
    tmp_path, script, code, error, said
):
    specs = [script("prefill-0"), script("decode-0", code)]
    with pytest.raises(error) as caught, Fleet(specs, tmp_path) as fleet:
        fleet.wait_ready()
    assert str(caught.value).startswith(f"decode-0 ended with {said}")
    assert str(tmp_path / "decode-0.log") in str(caught.value)
    assert all(engine.state is EngineState.DEAD for engine in fleet.engines)


def test_an_engine_that_is_not_ready_in_time_is_given_up(tmp_path, script):
    with (
        pytest.raises(LaunchError, match=r"prefill-0 is not ready after 0\.3 s"),
        Fleet([script(code=SLEEPS)], tmp_path, startup_timeout_seconds=0.3) as fleet,
    ):
        fleet.wait_ready()


def test_an_engine_that_does_not_end_when_asked_is_killed_after_the_grace(tmp_path, script, deaf):
    with Fleet([script(code=DEAF)], tmp_path, stop_timeout_seconds=0.5) as fleet:
        deaf(fleet)
        began = time.monotonic()
    assert 0.5 < time.monotonic() - began < 40
    assert fleet.engines[0].state is EngineState.DEAD


def test_a_kill_does_not_wait_for_the_grace(tmp_path, script, deaf):
    with Fleet([script(code=DEAF)], tmp_path, stop_timeout_seconds=60) as fleet:
        deaf(fleet)
        began = time.monotonic()
        fleet.kill()
    assert time.monotonic() - began < 40


def test_an_interrupt_while_stopping_kills_and_is_raised(tmp_path, script, deaf, monkeypatch):
    waits = iter([KeyboardInterrupt])
    finish_stop = EngineProcess.finish_stop

    def interrupted(engine):
        for error in waits:
            raise error
        finish_stop(engine)

    fleet = Fleet([script(code=DEAF)], tmp_path, stop_timeout_seconds=60)
    fleet.start()
    deaf(fleet)
    monkeypatch.setattr(EngineProcess, "finish_stop", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fleet.stop()
    assert time.monotonic() - began < 40
    assert fleet.engines[0].state is EngineState.DEAD


def test_an_engine_that_dies_later_is_seen_and_its_children_are_ended(tmp_path, script, eventually):
    with Fleet([script()], tmp_path) as fleet:
        fleet.wait_ready()
        root, child = pids_of(tmp_path, "prefill-0")
        os.kill(root, signal.SIGKILL)
        eventually(lambda: fleet.engines[0].poll() is EngineState.DEAD)
        assert fleet.engines[0].exit_code == -9
        assert not alive(child)


def test_an_engine_whose_guard_is_killed_is_dead_and_leaves_no_process_beside_its_restart(
    tmp_path, script, eventually
):
    with Fleet([script()], tmp_path) as fleet:
        fleet.wait_ready()
        earlier = pids_of(tmp_path, "prefill-0")
        os.kill(fleet.engines[0].pid, signal.SIGKILL)
        eventually(lambda: fleet.engines[0].poll() is EngineState.DEAD)
        eventually(lambda: not any(map(alive, earlier)))
        fleet.restart(fleet.engines[0])
        fleet.wait_ready()
    assert not any(map(alive, pids_of(tmp_path, "prefill-0")))


def test_a_stop_after_the_guard_was_killed_ends_the_engine(tmp_path, script, eventually):
    with Fleet([script()], tmp_path) as fleet:
        fleet.wait_ready()
        pids = pids_of(tmp_path, "prefill-0")
        os.kill(fleet.engines[0].pid, signal.SIGKILL)
    eventually(lambda: not any(map(alive, pids)))


def test_an_engine_starts_while_this_process_has_more_than_1024_open_files(tmp_path, script):
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


def test_the_router_raises_its_limit_of_open_files():
    hard = min(2_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    code = "import resource, kvferry.serving.run as run; run.raise_file_limit(); "
    code += "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    command = f"ulimit -Sn 300 && ulimit -Hn {hard} && exec '{sys.executable}' -c '{code}'"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(hard), str(hard)]


def test_engines_end_when_the_launcher_is_killed(tmp_path, eventually):
    launcher = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from support.scripted_engines import Script
from kvferry.serving.launch import Fleet, Role
from kvferry.serving.ports import free_ports
folder = {str(tmp_path)!r}
spec = Script(name="prefill-0", role=Role.PREFILL, model="m", port=free_ports(1)[0], folder=folder)
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
    eventually(lambda: not any(map(alive, pids)))


def test_shared_memory_of_a_killed_engine_is_removed(tmp_path, script, eventually):
    code = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
open(sys.argv[3] + "/name", "w").write(memory.name)
time.sleep(300)
"""
    with Fleet([script(code=code)], tmp_path) as fleet:
        eventually(lambda: (tmp_path / "name").exists() and (tmp_path / "name").read_text())
        segment = Path("/dev/shm") / (tmp_path / "name").read_text()
        assert segment.exists()
        fleet.kill()
    assert not segment.exists()
