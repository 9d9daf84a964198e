"""The child that tries metadata, where it does not do what it is asked. It needs no transport."""

import signal
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvferry.transport import metadata_sandbox
from kvferry.transport.metadata_sandbox import MetadataSandbox
from support.clock import Clock


@pytest.fixture
def deaf(monkeypatch):
    """A child that hears nothing, not even the end of its channel."""
    start, started = subprocess.Popen, []

    def popen(_, **options):
        started.append(start(["sleep", "600"], **options))
        return started[0]

    monkeypatch.setattr(metadata_sandbox, "nixl_package", lambda: "nixl")
    monkeypatch.setattr(metadata_sandbox.subprocess, "Popen", popen)
    yield MetadataSandbox("127.0.0.1")
    started[0].kill()
    started[0].wait()


def test_a_child_that_does_not_hear_the_end_of_its_channel_is_killed(deaf):
    deaf.kill()
    assert deaf._process.returncode == -signal.SIGKILL


def test_a_child_that_hangs_has_come_to_no_end(deaf, monkeypatch):
    monkeypatch.setattr(metadata_sandbox, "encode_trial", lambda card: b"")
    assert "did not come to an end" in deaf.run_trial(None, 0.0)
    monkeypatch.setattr(metadata_sandbox, "START_SECONDS", 0.0)
    assert "did not start in 0 s" in deaf.wait_ready()


class Slow:
    """A channel whose waits for a reply take these times, and then give what the child has said by then."""

    def __init__(self, clock: Clock, takes: Iterator[float], answers: Iterator[bool]) -> None:
        self.clock, self.takes, self.answers = clock, takes, answers

    def send_bytes(self, _: bytes) -> None:
        pass

    def poll(self, _: float) -> bool:
        self.clock.now += next(self.takes)
        return next(self.answers)

    def recv_bytes(self, _: int) -> bytes:
        return b""

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("takes", "answers", "passes"),
    [
        ([10.0], [False], False),
        ([86.0, 0.1], [False, True], True),
        ([86.0, 10.0], [False, False], False),
    ],
)
def test_a_child_gets_its_time_although_the_machine_stood_still(deaf, monkeypatch, takes, answers, passes):
    clock = Clock()
    monkeypatch.setattr(metadata_sandbox, "encode_trial", lambda card: b"")
    monkeypatch.setattr(metadata_sandbox, "time", SimpleNamespace(monotonic=clock))
    deaf._connection.close()
    deaf._connection = Slow(clock, iter(takes), iter(answers))
    assert (deaf.run_trial(None, 10.0) == "") == passes
