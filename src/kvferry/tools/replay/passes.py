"""Passes over a trace, each of which simulates engines: several at a time, in other processes.

A pass that `Passes.begin` begins waits in a queue. Other processes take passes from it, one process for each
further core. The process that wants a result takes passes too, until its pass is taken or done::

    begin ─▶ queue ─┬─▶ a helper: a thread and its process ─┬─▶ result
                    └─▶ the process that waits for a result ─┘

A process of its own for every pass would load all modules anew, and a fork would copy the locks of threads.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import NamedTuple, Self, TypeAlias

from kvferry.common.errors import ConfigError, KVFerryError
from kvferry.tools.replay.replayed import Replayed
from kvferry.tools.replay.settings import ReplaySettings, ServedModel
from kvferry.tools.replay.simulation import Simulation
from kvferry.tools.replay.trace.base import Trace, TraceRequest

# A process needs about as long to start. Passes that end sooner are done in this process.
_HEAD_START_SECONDS = 0.5
# Requests between two reports of progress.
_EVERY = 256


class Progress(NamedTuple):
    """How far a pass over a trace is."""

    number: int  # of the pass, different for each
    name: str
    read: int  # number of requests
    position: float  # as `Trace.position`
    has_ended: bool = False


OnProgress: TypeAlias = Callable[[Progress], object]


class _Job(NamedTuple):
    """A simulation of the whole trace."""

    number: int
    name: str
    model: ServedModel
    settings: ReplaySettings


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """A simulation that waits, runs or has ended."""

    job: _Job
    future: Future[Replayed] = field(default_factory=Future)


class _Failed(NamedTuple):
    """The sentence of a KVFerryError that ended a pass in another process."""

    sentence: str


class Passes:
    """The passes over one trace, and the owner of the processes that make them.

    Leaving its context ends all processes at once.

    Args:
        trace: the trace, for passes in this process.
        reopen: opens the trace in another process, so it must be picklable. Not called if nothing is begun.
        cores: number of passes at a time.
        on_progress: called for each pass, every few hundred requests and at its end, by any thread.
    """

    def __init__(
        self,
        trace: Trace,
        reopen: Callable[[], Trace],
        cores: int = 1,
        on_progress: OnProgress = lambda _: None,
    ) -> None:
        self.trace, self.unit_tokens = trace, trace.unit_tokens
        self._reopen, self._on_progress = reopen, on_progress
        self._most_helpers = cores - 1
        self._helpers: list[_Helper] = []
        self._waiting = SimpleQueue[Pass | None]()
        self._numbers = count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for helper in self._helpers:
            helper.end()
        for helper in self._helpers:
            helper.join()

    def requests(self, name: str) -> Iterator[TraceRequest]:
        """Yield the requests of the trace, as a pass of this process. `name` is for progress."""
        return _watched(self.trace, next(self._numbers), name, self._on_progress)

    def run(self, name: str, model: ServedModel, settings: ReplaySettings) -> Replayed:
        """Simulate the whole trace in this process."""
        one = _Job(next(self._numbers), name, model, settings)
        return _simulate(one, self.trace, self._on_progress)

    def begin(self, name: str, model: ServedModel, settings: ReplaySettings) -> Pass:
        """Have the whole trace, which can be read again, simulated while this process does other things."""
        one = Pass(_Job(next(self._numbers), name, model, settings))
        self._waiting.put(one)
        if len(self._helpers) < self._most_helpers:
            self._helpers.append(_Helper(self._waiting, self._reopen, self._on_progress))
            self._helpers[-1].start()
        return one

    def result(self, one: Pass) -> Replayed:
        """Return the outcome of a pass when it has ended. Meanwhile this process makes passes that wait.

        Raises:
            KVFerryError: the trace cannot be read, or the process that made the pass has died.
        """
        while not one.future.done():
            try:
                other = self._waiting.get_nowait()
            except Empty:
                break
            assert other is not None  # noqa: S101 - put only at the end
            other.future.set_result(_simulate(other.job, self.trace, self._on_progress))
        return one.future.result()


def _watched(trace: Trace, number: int, name: str, on_progress: OnProgress) -> Iterator[TraceRequest]:
    read = 0
    try:
        for request in trace:
            if read % _EVERY == 0:
                on_progress(Progress(number, name, read, trace.position()))
            read += 1
            yield request
    finally:
        on_progress(Progress(number, name, read, trace.position(), has_ended=True))


def _simulate(one: _Job, trace: Trace, on_progress: OnProgress) -> Replayed:
    simulation = Simulation(one.model, one.settings, trace.unit_tokens)
    simulation.run(_watched(trace, one.number, one.name, on_progress))
    return simulation.replayed()


class _Helper(Thread):
    """A thread that starts a process, gives it passes, and ends it.

    Args:
        waiting: passes that nobody has taken, or None to end.
    """

    def __init__(
        self, waiting: SimpleQueue[Pass | None], reopen: Callable[[], Trace], on_progress: OnProgress
    ) -> None:
        super().__init__(name="replay-helper", daemon=True)
        self._waiting, self._on_progress = waiting, on_progress
        self._ending, self._starting = Event(), Lock()
        # The process must not inherit locks of other threads.
        context = get_context("spawn")
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(self._theirs, reopen), daemon=True)

    def end(self) -> None:
        """Kill the process, and let the thread end."""
        with self._starting:
            self._ending.set()
            if self._process.pid is not None:
                self._process.kill()
        self._waiting.put(None)

    def run(self) -> None:
        if self._ending.wait(_HEAD_START_SECONDS) or not self._start():
            return
        try:
            self._pipe.recv()  # it has loaded all modules and opened the trace
            while (one := self._waiting.get()) is not None:
                try:
                    self._pipe.send(one.job)
                    one.future.set_result(self._answer())
                except KVFerryError as error:
                    one.future.set_exception(error)
                except (EOFError, OSError):
                    one.future.set_exception(self._death(one.job.name))
                    return
        except (EOFError, OSError):  # it has not even begun, so others make the passes
            return
        finally:
            self._process.kill()
            self._process.join()
            self._pipe.close()

    def _start(self) -> bool:
        """Start the process. Return False if it must not be started, or cannot be."""
        # A process inherits the blocked signals of the thread that starts it. Ctrl-C reaches all processes of
        # a terminal, and would have each of them print a traceback. The start of the tracker, which every
        # first process brings along, ends the block.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        with self._starting:
            if self._ending.is_set():
                return False
            try:
                self._process.start()
            except OSError:  # no memory, or too many processes
                return False
        # Else this process would keep the pipe of a dead one open, and wait for its answer.
        self._theirs.close()
        return True

    def _answer(self) -> Replayed:
        while isinstance(found := self._pipe.recv(), Progress):
            self._on_progress(found)
        if isinstance(found, _Failed):
            raise ConfigError(found.sentence)
        assert isinstance(found, Replayed)  # noqa: S101 - the last kind of answer
        return found

    def _death(self, name: str) -> KVFerryError:
        self._process.join()
        code = self._process.exitcode or 0
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return KVFerryError(
            f"the process of the pass {name!r} died ({how}); if the machine has too little memory for "
            "several passes at once, give the command one core, as in taskset --cpu-list 0 kvferry replay"
        )


def _work(pipe: Connection, reopen: Callable[[], Trace]) -> None:
    """Make passes until the other end of the pipe is closed. The entry point of a helper's process."""
    try:
        try:
            trace = reopen()
        except KVFerryError:  # the command cannot open it either, and says so
            return
        pipe.send(None)
        while True:
            one: _Job = pipe.recv()
            try:
                found: Replayed | _Failed = _simulate(one, trace, pipe.send)
            except KVFerryError as error:
                found = _Failed(str(error))
            pipe.send(found)
    except (EOFError, OSError):  # the command has ended
        pass
