import os
import signal
import sys
import time
from pathlib import Path

import pytest

from kvferry.doctor.finding import State, ok
from kvferry.doctor.limits import CheckTimeout, run_all_within, run_check, run_python, run_within

pytestmark = pytest.mark.slow

FOREVER = "import time; time.sleep(600)"


def test_a_slow_call_is_left_in_its_thread():
    began = time.monotonic()
    with pytest.raises(CheckTimeout):
        run_within(0.05, lambda: time.sleep(30))
    assert time.monotonic() - began < 5


def test_a_call_in_time_returns_or_raises():
    assert run_within(5, lambda: 7) == 7
    with pytest.raises(KeyError):
        run_within(5, lambda: {}["nothing"])


def test_a_hanging_call_hides_no_other_result():
    slow, good, broken = run_all_within(0.5, [lambda: time.sleep(30), lambda: 1, lambda: {}[0]])
    assert isinstance(slow, CheckTimeout)
    assert good == 1
    assert isinstance(broken, KeyError)


def test_a_check_that_hangs_or_breaks_is_a_finding():
    assert run_check("it", 5, lambda: [ok("it", "is well")]) == [ok("it", "is well")]
    (hung,) = run_check("it", 0.05, lambda: time.sleep(30))
    assert (hung.state, hung.found) == (State.BAD, "no answer: no result in 0.05 s")
    (broken,) = run_check("it", 5, lambda: [1 / 0])
    assert "ZeroDivisionError" in broken.found


def test_a_process_that_hangs_is_killed_with_what_it_started(tmp_path: Path):
    child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', '{FOREVER}']); "
    child += "print(p.pid, flush=True); p.wait()"
    ended = run_python(["-c", child], 4)
    assert ended.code is None
    assert ended.how == "it did not finish in time"
    grandchild = int(ended.out)
    until = time.monotonic() + 5
    while alive(grandchild):
        assert time.monotonic() < until
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_result_says_how_a_process_ended():
    done = run_python(["-c", "import os, sys; print(os.environ['A']); sys.exit(3)"], 20, {"A": "given"})
    assert (done.code, done.out, done.how) == (3, "given\n", "it ended with exit code 3")
    killed = run_python(["-c", f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})"], 20)
    assert killed.how == "signal 11 ended it"
    assert sys.executable
    assert os.environ.get("A") is None
