"""Measure the cost of verifying what is read from peers.

The same request is read by two ranks, one of which compares digests of its blocks with the producer's. Both
sides share the cores and the memory of this machine, which engines on two machines would not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

from benchmarks.hosts import LinkedHost, on_linked_hosts, start_producer
from benchmarks.safety.cost import ProtectionCost, SafetyJob
from kvferry.tools.measuring.producer_process import ProducerProcess, use_transports
from kvferry.tools.measuring.reader import Reader
from kvferry.tools.measuring.rounds import run_rounds
from kvferry.tools.measuring.simulated import SimulatedEngine, simulate_engine
from kvferry.tools.plan.side import EngineSide
from kvferry.transport.costs import TransferSettings

TARGET = 0.03
"""Largest allowed share of a transfer's time."""

_PART = "verify"

_ALIKE = EngineSide(), EngineSide()
_UNLIKE = EngineSide(tp=2, block_tokens=32), EngineSide(block_tokens=16, layout="LBHNC")
# By name of the pair: prefill and decode engine, and UCX_TLS, None to let UCX choose.
_ON_ONE_HOST = {
    "alike": (*_ALIKE, None),
    "from TP2, other blocks and layout": (*_UNLIKE, None),
    "alike, over TCP": (*_ALIKE, "tcp,self"),
}
_LINKED = {"alike": _ALIKE, "from TP2, other blocks and layout": _UNLIKE}


def measure(job: SafetyJob, progress: Callable[[str], None]) -> list[ProtectionCost]:
    """Measure whole transfers between two processes, verified and not, and return the costs.

    Args:
        job: settings of the benchmark.
        progress: function that is called with a line of text before each round.
    """
    if job.gigabits is not None:
        costs: list[ProtectionCost] = on_linked_hosts(partial(_measure_linked, job, progress))
        return costs
    found = []
    for name, (*sides, transports) in _ON_ONE_HOST.items():
        with patch.dict(os.environ):  # the next measurement has transports of its own
            settings = use_transports(transports)
            start = partial(ProducerProcess, settings=settings)
            found += _measure(job, name, sides, TransferSettings(), start, progress)
    return found


def _measure_linked(
    job: SafetyJob, progress: Callable[[str], None], there: LinkedHost, here: LinkedHost
) -> list[ProtectionCost]:
    for host in (there, here):
        host.limit(job.gigabits or 0)
    # Both hosts are one machine. kvferry would share memory with a process of it that it reads slowly.
    settings, start = TransferSettings(timed_read_bytes=0), partial(start_producer, there, here)
    with patch.dict(os.environ, here.network):
        return [
            cost
            for name, sides in _LINKED.items()
            for cost in _measure(job, f"{name}, {job.gigabits:g} Gbit/s", sides, settings, start, progress)
        ]


def _measure(
    job: SafetyJob,
    name: str,
    sides: Sequence[EngineSide],
    settings: TransferSettings,
    start: Callable[[Sequence[SimulatedEngine]], ProducerProcess],
    progress: Callable[[str], None],
) -> list[ProtectionCost]:
    prefill, decode = sides
    source, *destinations = (
        simulate_engine(role, job.reading, side, job.tokens, seed=seed)
        for seed, (role, side) in enumerate(
            (("source", prefill), ("verified", decode), ("unverified", decode)), 1
        )
    )
    with (
        start([source]) as producer,
        Reader(destinations[0], producer, settings=replace(settings, verify=True)) as verified,
        Reader(destinations[1], producer, settings=settings) as unverified,
    ):
        loads = _Loads(verified, source), _Loads(unverified, source)
        on, off = run_rounds([each.load for each in loads], job.repeats, progress)
    work = f"transfer of {job.tokens:,} tokens, {name}"
    cpu = [each.cpu_seconds[-job.repeats :] for each in loads]  # without the round that does not count
    return [
        ProtectionCost(part=_PART, work=work, on=tuple(on), off=tuple(off), target=TARGET),
        ProtectionCost(part=_PART, work=f"its processor time, {name}", on=tuple(cpu[0]), off=tuple(cpu[1])),
    ]


class _Loads:
    """Loads of one request's KV by a reader. `cpu_seconds` is the processor time of both sides in each."""

    def __init__(self, reader: Reader, source: SimulatedEngine) -> None:
        self.cpu_seconds: list[float] = []
        self._reader, self._source = reader, source

    def load(self) -> float:
        """Load the KV, check it, and return the seconds until the request may use it."""
        reader = self._reader
        # Else bytes of the load before would pass the check.
        reader.clear()
        sides = os.getpid(), reader.producer.pid
        before = sum(map(_cpu_seconds, sides))
        _, seconds = reader.load(self._source)
        self.cpu_seconds.append(sum(map(_cpu_seconds, sides)) - before)
        reader.check()
        reader.producer.wait_ended()
        return seconds


def _cpu_seconds(pid: int) -> float:
    """Return the time that a process's living threads have run, in seconds."""
    # `/proc/PID/stat` counts in steps of 10 ms, as long as a transfer.
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
