"""The child that tries metadata, where it does not do what it is asked. It needs no transport."""

import signal
import subprocess

import pytest

from kvferry.transport import metadata_sandbox
from kvferry.transport.metadata_sandbox import MetadataSandbox


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
