"""`kvferry bench calibrate`: what reading, copying and asking cost on this machine.

The three are measured apart, each through the code that does it in a transfer: READs between two processes
through `transport.agent`, gathers and scatters through `memory.copy`, asking through the gather channel.
Sizes are taken in an order drawn anew every round: a slow minute of the machine does not fall on one of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import zmq

from kvferry.bench.engines import Engine, engine, read_geometry
from kvferry.bench.fit import Fit, fit
from kvferry.bench.link import Producer
from kvferry.bench.raw import Patience, RawReads
from kvferry.bench.reader import Reader
from kvferry.bench.stats import Spread
from kvferry.errors import TransferError
from kvferry.geometry import Region
from kvferry.geometry.models import ModelReading
from kvferry.memory.copy import Loops, Slots
from kvferry.memory.space import Space
from kvferry.plan.side import Side
from kvferry.planning.nest import Loop, Nest
from kvferry.planning.strategy import LARGEST_CHUNK_BYTES, Costs
from kvferry.transport.gather_client import GatherClient
from kvferry.transport.gather_messages import Gathered, GatherRoute


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured.

    Attributes:
        repeats: rounds.
        transports: value of UCX_TLS, None to leave it as it is.
        read_sizes: bytes of a descriptor.
        read_bytes: of a READ, at most; of short descriptors fewer are read.
        read_descriptors: of a READ, at most.
        runs: bytes that are copied in a row.
        cells: bytes of a cell that is gathered or scattered, so many runs side by side.
        copy_bytes: of a gather or scatter.
    """

    repeats: int = 9
    transports: str | None = None
    read_sizes: tuple[int, ...] = tuple(1 << n for n in range(10, 23, 2))
    read_bytes: int = 64 << 20
    read_descriptors: int = 8192
    runs: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    cells: tuple[int, ...] = (16 << 10, 64 << 10, 256 << 10)
    copy_bytes: int = LARGEST_CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Costs, and how well they predict what they were fitted to.

    Attributes:
        costs: fitted.
        reads, copies: of each.
        ask: seconds of asking, all rounds.
    """

    costs: Costs
    reads: Fit
    copies: Fit
    ask: Spread


def calibrate(job: Job, progress: Callable[[str], None]) -> Calibrated:
    """Measure and fit.

    Raises:
        ConfigError: memory or NIXL cannot be had.
        TransferError: the other process died, or something could not be moved.
    """
    settings = {} if job.transports is None else {"UCX_TLS": job.transports}
    os.environ.update(settings)
    progress("starting the producer process")
    src, dst = (_room(name, job.read_bytes) for name in ("source", "destination"))
    with Producer([src], settings) as producer, Reader(dst, producer) as reader:
        progress("reading descriptors of several sizes")
        with closing(RawReads(reader)) as raw:
            reads = _reads(job, raw, reader.cache.buffer.nbytes)
        progress("asking for gathers")
        ask = _asking(job, reader)
    progress("copying runs of several lengths")
    copies = _copies(job)
    read_descriptor, read_byte = reads.costs.tolist()
    call, run, byte = copies.costs.tolist()
    costs = Costs(read_descriptor, read_byte, call, run, byte, ask.median)
    return Calibrated(costs, reads, copies, ask)


def _room(name: str, size: int) -> Engine:
    """An engine of plain attention with a request of about so many bytes."""
    reading = _plain()
    tokens = max(16, size // reading.cache.layers[0].whole_bytes // len(reading.cache.layers))
    return engine(name, reading, Side(layout="BLHNC"), tokens)


def _plain() -> ModelReading:
    return read_geometry("Llama-3.1-8B", {"num_hidden_layers": 8})


def _reads(job: Job, raw: RawReads, room: int) -> Fit:
    lists = []
    for size in job.read_sizes:
        count = min(job.read_descriptors, min(job.read_bytes, room) // size)
        if count:
            lists.append(raw.large(count * size, size))
    seconds = _rounds([partial(raw.read, made) for made in lists], job.repeats)
    work = np.array([[len(made.indices.src), made.bytes] for made in lists], np.float64)
    return fit(work, seconds)


def _copies(job: Job) -> Fit:
    copies = [
        copy
        for run in job.runs
        for cell in job.cells
        if cell >= run
        for copy in (_Copy(run, cell, job.copy_bytes, "src"), _Copy(run, cell, job.copy_bytes, "dst"))
    ]
    seconds = _rounds([copy.once for copy in copies], job.repeats)
    return fit(np.array([copy.work for copy in copies], np.float64), seconds)


class _Copy:
    """Cells of equal runs, every other stretch of a pool, gathered into images or scattered from them.

    Attributes:
        work: calls, runs and bytes.
    """

    def __init__(self, run: int, cell: int, size: int, side: str) -> None:
        cells = max(1, size // cell)
        runs = cell // run
        pool, images = (torch.zeros(cells * cell * factor, dtype=torch.uint8) for factor in (2, 1))
        regions = [Region(memory.data_ptr(), memory.nbytes) for memory in (pool, images)]
        there, here = regions[0].address, 0
        loops = (Loop(runs, 2 * run, run),) if runs > 1 else ()
        nest = Nest(there, here, run, loops)
        if side == "dst":
            nest = Nest(here, there, run, tuple(Loop(loop.count, loop.dst, loop.src) for loop in loops))
        self._keep = pool, images
        self._loops = Loops([nest], Space(regions[:1]), side, 2 * cell, cells)
        self._slots = Slots(Space(regions[1:]), regions[1].address, cell)
        self._blocks = torch.from_numpy(np.random.default_rng(5).permutation(cells))
        self._gathers = side == "src"
        self.work = (cells, cells * runs, cells * cell)

    def once(self) -> float:
        """Copy all; seconds."""
        copy = self._loops.gather if self._gathers else self._loops.scatter
        started = time.perf_counter()
        copy(self._blocks, self._slots, 0, 1)
        return time.perf_counter() - started


def _asking(job: Job, reader: Reader) -> Spread:
    """Seconds from asking a rank to gather next to nothing until its answer is here."""
    (card,) = reader.cards[0]
    outgoing = card.outgoing
    if outgoing is None:
        raise TransferError("the producer process does not gather: please report this")
    route = GatherRoute(64, 2, 64, ((Nest(card.geometry.regions[0].address, 0, 64),),))
    context: zmq.Context[Any] = zmq.Context()
    client = GatherClient(context, outgoing.host, outgoing.port, [route], None)
    ticket = reader.producer.grant(0, "asking")
    seconds = []
    try:
        for _ in range(10 * job.repeats + 1):
            give_up = Patience(reader.producer.check)
            started = time.perf_counter()
            chunk = client.ask(0, ticket, np.ones(1, np.int64), 0)
            while (answer := client.answer(chunk)) is None:
                give_up.look()
                client.socket.poll(1)
            seconds.append(time.perf_counter() - started)
            if not isinstance(answer, Gathered):
                raise TransferError(f"the producer process did not gather: {answer.reason}")
            client.done(chunk)
    finally:
        client.close()
        context.destroy(linger=0)
        reader.acknowledge("asking")
    return Spread.of(seconds[1:])


def _rounds(timed: Sequence[Callable[[], float]], repeats: int) -> np.ndarray:
    """Median seconds of each, over rounds in an order of their own; a round before does not count."""
    draw = np.random.default_rng(11)
    seconds = np.empty((repeats + 1, len(timed)))
    for number in range(repeats + 1):
        for which in draw.permutation(len(timed)):
            seconds[number, which] = timed[which]()
    return np.asarray(np.median(seconds[1:], axis=0))
