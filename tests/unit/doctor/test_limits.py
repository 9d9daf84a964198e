import os
import signal
import threading
from pathlib import Path

import pytest

from kvferry.tools.doctor.finding import (
    CheckTimeout,
    State,
    ok,
    run_all_within,
    run_check,
    run_python,
    run_within,
)
from support.waiting import wait_for

pytestmark = pytest.mark.slow

FORKS = "import os, signal; child = os.fork(); child and print(child, flush=True); signal.pause()"


@pytest.fixture
def hang():
    """A function that returns at the end of the test only."""
    ended = threading.Event()
    yield ended.wait
    ended.set()


def test_a_slow_call_is_left_in_its_thread(hang):
    with pytest.raises(CheckTimeout):
        run_within(0.05, hang)


def test_a_call_in_time_returns_or_raises():
    assert run_within(60, lambda: 7) == 7
    with pytest.raises(KeyError):
        run_within(60, lambda: {}["nothing"])


def test_a_hanging_call_hides_no_other_result(hang):
    slow, good, broken = run_all_within(1.0, [hang, lambda: 1, lambda: {}[0]])
    assert isinstance(slow, CheckTimeout)
    assert good == 1
    assert isinstance(broken, KeyError)


def test_a_check_that_hangs_or_breaks_is_a_finding(hang):
    assert run_check("it", 60, lambda: [ok("it", "is well")]) == [ok("it", "is well")]
    (hung,) = run_check("it", 0.05, hang)
    assert (hung.state, hung.found) == (State.BAD, "no answer: no result in 0.05 s")
    (broken,) = run_check("it", 60, lambda: [1 / 0])
    assert "ZeroDivisionError" in broken.found


def test_a_process_that_hangs_is_killed_with_what_it_started():
    # On a busy machine the first deadlines may pass before the process has started another one.
    for seconds in (0.2, 1.0, 5.0, 25.0):
        ended = run_python(["-I", "-S", "-c", FORKS], seconds)
        assert ended.code is None
        if ended.out:
            break
    assert ended.how == "it did not finish in time"
    wait_for(lambda: not alive(int(ended.out)))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_result_says_how_a_process_ended():
    done = run_python(["-c", "import os, sys; print(os.environ['A']); sys.exit(3)"], 60, {"A": "given"})
    assert (done.code, done.out, done.how) == (3, "given\n", "it ended with exit code 3")
    killed = run_python(["-c", f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})"], 60)
    assert killed.how == "signal 11 ended it"
    assert os.environ.get("A") is None
