"""Case: peers that one decode engine knows.

Two parts of a decode engine meet all peers: its scheduler and one worker. All classes are the product's, and
so are CURVE, ZeroMQ and NIXL. But all peers are one engine in this process, under many names:

- The scheduler (`scheduler_peers`) reaches one control channel at many loopback addresses.
- The worker (`worker_peers`) loads the transport metadata of one NIXL agent under many names, with one
  reading thread. The child process that validates metadata is left out. The model has 32 layers with tiny
  pages.

What is measured:

- *handshake*: meet a peer on the control channel. It includes the peer's part, which runs in this process.
- *connect*: the worker's part: planning templates, and NIXL's agent and descriptor lists.
- *claim*: one request at a known peer, in the scheduler: redeem the ticket, and order the workers to read.
- *step*: one step of the scheduler in which nothing happens, while all peers are connected.
- *load*: one request at a known peer, in the worker: plan, READ 1,024 tokens, and check the lease.
- *plan*: the planning in it.
- *memory*: growth of the resident memory of a process of its own, both sides together.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import psutil

from benchmarks.scale.case import Case, Figures
from benchmarks.scale.memory import in_new_process
from benchmarks.scale.open_files import allow_open_files
from benchmarks.scale.result import Measure
from benchmarks.scale.scheduler_peers import SchedulerPeers
from benchmarks.scale.worker_peers import WorkerPeers

_FILES_PER_PEER, _OTHER_FILES = 8, 500
_KNOWN_BEFORE = 10
"""Peers that are met before memory is measured, so that what all peers share is not counted."""


@contextmanager
def _prepare(size: int) -> Iterator[Callable[[], Figures]]:
    """Yield a function that measures one round with `size` peers."""
    allow_open_files(_OTHER_FILES + _FILES_PER_PEER * size)
    yield partial(_round, size)


def _round(size: int) -> Figures:
    with closing(SchedulerPeers()) as scheduler:
        handshake = scheduler.meet(size) / size
        scheduler.connect_workers()
        claim, step = scheduler.time_claim(), scheduler.time_step()
    with closing(WorkerPeers()) as worker:
        connect = worker.connect(size) / size
        load, plan = worker.time_load()
    return {
        "handshake": handshake,
        "connect": connect,
        "claim": claim,
        "step": step,
        "load": load,
        "plan": plan,
    }


def _memory(size: int) -> Figures:
    return {"memory": in_new_process(_grown_bytes, size)}


def _grown_bytes(size: int) -> float:
    """Return the bytes by which this process grows with each of `size` peers."""
    allow_open_files(_OTHER_FILES + _FILES_PER_PEER * size)
    with closing(SchedulerPeers()) as scheduler, closing(WorkerPeers()) as worker:
        scheduler.meet(_KNOWN_BEFORE)
        worker.connect(_KNOWN_BEFORE)
        gc.collect()
        before = _resident_bytes()
        scheduler.meet(size)
        worker.connect(size)
        gc.collect()
        return (_resident_bytes() - before) / size


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


CASE = Case(
    name="peers",
    noun="peers",
    sizes=(10, 50, 200, 1_000),
    measures=(
        Measure(name="handshake", label="shake hands with {n} peers", per="peer", unit="seconds"),
        Measure(name="connect", label="connect a worker to {n} peers", per="peer", unit="seconds"),
        Measure(name="claim", label="claim a request's KV, {n} peers known", per="request", unit="seconds"),
        Measure(name="step", label="a scheduler step, {n} peers known", per="step", unit="seconds"),
        Measure(name="load", label="load a request, {n} peers known", per="request", unit="seconds"),
        Measure(name="plan", label="plan a request's read, {n} peers known", per="request", unit="seconds"),
        Measure(name="memory", label="memory for {n} peers", per="peer", unit="bytes"),
    ),
    prepare=_prepare,
    once=_memory,
)
