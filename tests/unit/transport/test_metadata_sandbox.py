"""The child that tries metadata, where it does not do what it is asked. It needs no transport."""

import os
import signal
import subprocess
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from kvferry.transport import metadata_sandbox
from kvferry.transport.metadata_sandbox import MetadataSandbox
from transport.cards import cards

(CARD,) = cards()
WAIT = 600.0  # longer than a test may take


@pytest.fixture(autouse=True)
def package(monkeypatch):
    monkeypatch.setattr(metadata_sandbox, "nixl_package", lambda: "nixl")


@pytest.fixture
def started():
    """Processes that hear nothing, not even the end of their channel."""
    started = list[subprocess.Popen]()
    yield started
    for one in started:
        one.kill()
        one.wait()


@pytest.fixture
def deaf(started):
    def start(_, **options):
        started.append(subprocess.Popen(["sleep", "600"], **options))
        return started[-1]

    return MetadataSandbox("127.0.0.1", start=start)


def test_a_child_that_does_not_hear_the_end_of_its_channel_is_killed(deaf, started):
    deaf.kill()
    assert started[0].returncode == -signal.SIGKILL


def test_a_child_that_hangs_has_come_to_no_end(deaf):
    assert "did not come to an end" in deaf.run_trial(CARD, 0.0)
    assert "did not start in 0 s" in deaf.wait_ready(0.0)


def test_a_child_that_is_stopped_is_not_waited_for(deaf):
    os.kill(deaf.pid, signal.SIGSTOP)
    assert "was stopped" in deaf.wait_ready(WAIT)
    assert "was stopped" in deaf.run_trial(CARD, WAIT)


@pytest.mark.parametrize(
    ("takes", "answers", "passes"), [(1.0, True, False), (86.0, True, True), (86.0, False, False)]
)
def test_a_child_gets_its_time_although_the_machine_stood_still(takes, answers, passes):
    """The machine stands still while this process waits for the reply, which comes afterwards."""
    theirs, times = [], iter([0.0, takes])

    def start(_, pass_fds, **options):
        theirs.append(Connection(os.dup(pass_fds[0])))
        return SimpleNamespace(pid=os.getpid())  # no child, so not a stopped one

    def clock() -> float:
        now = next(times)
        if now and answers:
            theirs[0].send_bytes(b"")
        return now

    sandbox = MetadataSandbox("127.0.0.1", start=start, clock=clock)
    assert (sandbox.run_trial(CARD, 0.1) == "") == passes
    theirs[0].close()
