"""Signals are seen at safe points, in work that may be interrupted at once, and never lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from kvferry.tools.serving.processes import StopRequested, StopSignals


@pytest.fixture(autouse=True)
def _hang_up_is_heard() -> Iterator[None]:
    """Tests may run under nohup, which ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def leave(done: list[str]) -> None:
    send()
    done.append("after")


def send(number: int = signal.SIGTERM) -> None:
    signal.raise_signal(number)  # to this thread, and at once: there may be others


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 129)]
)
def test_first_signal_is_recorded_and_second_raises(number, code) -> None:
    with StopSignals() as signals:
        signals.check()
        send(number)
        with pytest.raises(StopRequested):
            signals.check()
        assert (signals.received, signals.exit_code) == (number, code)
        with pytest.raises(KeyboardInterrupt):
            send(number)
        send(number)


def test_first_signal_raises_only_in_interruptible_work() -> None:
    done = []
    with StopSignals() as signals:
        with signals.interruptible():
            done.append("before")
        with pytest.raises(KeyboardInterrupt), signals.interruptible():
            leave(done)
        assert done == ["before"]
        with pytest.raises(StopRequested):
            signals.check()


def test_interruptible_work_does_not_begin_after_a_signal() -> None:
    with StopSignals() as signals:
        send()
        with pytest.raises(StopRequested), signals.interruptible():
            pytest.fail("it began")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_dropped_in_a_finalizer_raises_at_the_end_of_interruptible_work() -> None:
    class Finalized:
        def __del__(self) -> None:
            send()

    def drop(done: list[str]) -> None:
        Finalized()
        done.append("dropped")

    done: list[str] = []
    with StopSignals() as signals:
        with pytest.raises(StopRequested), signals.interruptible():
            drop(done)
        assert done == ["dropped"]


def test_ignored_hang_up_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            send(signal.SIGHUP)
            assert signals.received is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_restored_at_the_end() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
