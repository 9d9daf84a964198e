"""This end of a pair of processes: a handle on the producer, and a reader in this process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.geometry import RankGeometry, Region
from kvferry.planning.select import LoadSpan
from kvferry.transport.agent import Agent, ReadState
from kvferry.transport.costs import TransferSettings
from kvferry.transport.lease import LeaseWord, LeaseWords
from kvferry.transport.messages import RankCard
from kvferry.transport.metadata_sandbox import MetadataSandbox
from kvferry.transport.metadata_validation import MetadataValidator
from kvferry.transport.read_plan import ReadOrder, Report
from kvferry.transport.transfers import Transfers
from support.keys import KEYS
from support.waiting import wait_for
from transport.memory import place
from transport.producer import Produce

TESTS = Path(__file__).parents[1]
INCARNATION = 100
FIRST = LeaseWord(slot=0, generation=0, incarnation=1)
_PROGRAM = """
import sys
from multiprocessing.connection import Connection
from transport.producer import main
main(Connection(int(sys.argv[1])))
"""


def _path() -> str:
    return os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


class Producer:
    """A process that holds an engine's blocks."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": _path(), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self.cards: tuple[RankCard, ...] = ()

    def become(self, order: Produce) -> Producer:
        """Hold these blocks instead of what it held; its cards are the new ones."""
        self._connection.send(order)
        self.cards = tuple(self._answer())
        return self

    def tell(self, *order: Any) -> None:
        """Have it do something; returns when it has."""
        self._connection.send(order)
        self._answer()

    def _answer(self) -> Any:
        assert self._connection.poll(200), "the producer says nothing"
        return self._connection.recv()

    def signal(self, number: signal.Signals) -> None:
        """Stop, continue or kill it; returns when all its threads have stopped, or it is gone."""
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitpid(self.process.pid, os.WUNTRACED)
        if number == signal.SIGKILL:
            self.process.wait(10)

    def end(self) -> None:
        """Whatever became of it."""
        self._connection.close()
        self.process.kill()
        self.process.wait(10)


class Watched(Agent):
    """NIXL, counting what is held, and noting whether anything in flight is given back.

    Attributes:
        gate: while it is clear, a finished READ is not seen to be finished.
        before_read: called with the number of READs so far before the next one is made.
        most_reads: the largest number of READs that were held at a time.
        regions: memory that was registered.
    """

    def __init__(self, name: str, *, progress: bool) -> None:
        super().__init__(name, progress=progress)
        self.held: dict[str, int] = {"peers": 0, "lists": 0, "reads": 0, "regions": 0}
        self.released_in_flight = 0
        self.made = self.posted = self.most_reads = 0
        self.regions: list[Region] = []
        self.before_read: Callable[[int], object] = lambda number: None
        self.gate = threading.Event()
        self.gate.set()

    def register(self, regions: Any) -> None:
        super().register(regions)
        self.regions += regions
        self.held["regions"] += 1

    def add_peer(self, metadata: bytes) -> str:
        name = super().add_peer(metadata)
        self.held["peers"] += 1
        return name

    def drop_peer(self, name: str) -> None:
        super().drop_peer(name)
        self.held["peers"] -= 1

    def prepare(self, *arguments: Any) -> Any:
        handle = super().prepare(*arguments)
        self.held["lists"] += 1
        return handle

    def release_list(self, handle: Any) -> None:
        super().release_list(handle)
        self.held["lists"] -= 1

    def transfer(self, *arguments: Any) -> Any:
        self.before_read(self.made)
        handle = super().transfer(*arguments)
        self.made += 1
        self.held["reads"] += 1
        self.most_reads = max(self.most_reads, self.held["reads"])
        return handle

    def post(self, handle: Any) -> ReadState:
        self.posted += 1
        return super().post(handle)

    def state(self, handle: Any) -> ReadState:
        found = super().state(handle)
        return found if self.gate.is_set() else ReadState.IN_FLIGHT

    def release(self, handle: Any) -> None:
        with suppress(Exception):  # an errored READ may have no state
            self.released_in_flight += super().state(handle) is ReadState.IN_FLIGHT
        super().release(handle)
        self.held["reads"] -= 1

    def close(self) -> None:
        super().close()
        self.held["regions"] = 0


class KeptValidator:
    """A validator that all readers of a session share, so that its child process starts once."""

    def __init__(self) -> None:
        self._shared = MetadataValidator(partial(MetadataSandbox, "127.0.0.1"))
        self.validate, self.warm_up, self.end = (
            self._shared.validate,
            self._shared.warm_up,
            self._shared.close,
        )

    def close(self) -> None:
        """Stay open: the next reader uses it."""


class Reader:
    """One rank of the engine that reads, in this process. An `idle` engine reads small orders itself."""

    def __init__(
        self,
        made_up: RankGeometry,
        name: str,
        in_flight: int = 8,
        settings: TransferSettings | None = None,
        **options: Any,
    ) -> None:
        self.rank, self.memory = place(made_up, 1000)
        self.before = self.memory.bytes.copy()
        self.agents: list[Watched] = []
        settings = replace(settings or TransferSettings(lanes=1, timed_read_bytes=0), keys=KEYS)
        self.thread = Transfers(
            name, self.rank, LeaseWords(1, 1), settings, self._make_agent, in_flight, **options
        )
        self.idle = False
        self._results: dict[str, Report] = {}
        self._began = time.perf_counter()

    def _make_agent(self, name: str, *, progress: bool) -> Agent:
        if progress:
            return Agent(name)
        self.agents.append(Watched(name, progress=False))
        return self.agents[-1]

    @property
    def agent(self) -> Watched:
        """Of the only lane."""
        (agent,) = self.agents
        return agent

    def submit(
        self,
        key: str,
        peer: str,
        span: LoadSpan,
        src: Sequence[np.ndarray],
        dst: Sequence[np.ndarray],
        lease: LeaseWord = FIRST,
    ) -> None:
        order = ReadOrder(key, peer, span, tuple(src), tuple(dst), lease)
        self.thread.submit(order, idle=self.idle)

    def poll(self, key: str) -> Report | None:
        """Return how an order ended; None if it has not."""
        for ended, report in self.thread.results():
            assert ended not in self._results, f"{ended} has two reports"
            assert (
                0
                <= report.figures.transfer_seconds + report.figures.check_seconds
                <= time.perf_counter() - self._began
            )
            self._results[ended] = report
        return self._results.get(key)

    def result(self, key: str) -> Report:
        """Wait until an order has ended."""
        return wait_for(lambda: self.poll(key))

    def end(self) -> None:
        for agent in self.agents:
            agent.gate.set()
        self.thread.close(10.0)
        assert not any(agent.released_in_flight for agent in self.agents), "a READ was given back in flight"
