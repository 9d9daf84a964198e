"""Measure the costs of READs, copies and gather requests on this machine.

Each cost is measured separately, with the code that transfers use: READs between two processes by
`transport.agent`, gathers and scatters by `memory.staging_copies`, requests over the gather channel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import zmq

from kvferry.common.errors import TransferError
from kvferry.memory import AddressSpace, StagedImages, StagingCopies, enter_stream, region_over
from kvferry.planning import (
    COPY_ENGINE_BYTES,
    LARGEST_SEGMENT_BYTES,
    ONE_CELL,
    Costs,
    Loop,
    PoolCopies,
    StridedCopy,
)
from kvferry.tools.measuring.gpus import shortest_engine_run, source_and_destination
from kvferry.tools.measuring.producer_process import ProducerProcess, WaitLimit, use_transports
from kvferry.tools.measuring.raw_reads import HostCopy, RawReads
from kvferry.tools.measuring.reader import Reader
from kvferry.tools.measuring.rounds import Spread, run_rounds
from kvferry.tools.measuring.simulated import plain_engine
from kvferry.transport import GatherClient, Gathered, GatherRoute, TransferSettings

_Floats: TypeAlias = npt.NDArray[np.float64]

# The small gather measures the request itself, the large one the copy beside a READ.
_SMALL_RUN, _LARGE_RUN = 64, 2048
_SMALL, _LARGE = range(2)
# READs that are limited by the work per descriptor, and by bytes.
_LANE_RUNS = 2 << 10, 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """The costs that were fitted to timings, and the errors of the fit."""

    costs: _Floats  # seconds per piece of work of each kind, float64 of shape (kinds,)
    # Relative error of each predicted timing, |predicted / measured - 1|, float64 of shape (timings,).
    errors: _Floats

    @property
    def median_error(self) -> float:
        return float(np.median(self.errors))

    @property
    def worst_error(self) -> float:
        return float(self.errors.max())


def fit(work: _Floats, seconds: _Floats) -> Fit:
    """Fit the cost of each kind of work to timings, by least squares of the relative errors.

    For example, three descriptors with 300 bytes together take 6.3 µs, and one descriptor with 1,000 bytes
    takes 3 µs. So a descriptor costs 2 µs, and a byte costs 1 ns:

    >>> fit(np.array([[3.0, 300.0], [1.0, 1000.0]]), np.array([6.3e-6, 3e-6])).costs.round(12).tolist()
    [2e-06, 1e-09]

    Args:
        work: number of pieces of work of each kind, for each timing, float64 of shape (n, kinds).
        seconds: measured timings, float64 of shape (n,); all are positive.
    """
    # Dividing each row by its time turns the absolute error into the relative one.
    relative = work / seconds[:, None]
    costs = _not_negative(relative, np.ones(len(seconds)))
    return Fit(costs, np.abs(relative @ costs - 1))


def _not_negative(matrix: _Floats, target: _Floats) -> _Floats:
    """Return x of shape (kinds,), without negative elements, that minimizes ``|matrix @ x - target|``."""
    kinds = matrix.shape[1]
    best, least = np.zeros(kinds), float(target @ target)
    # With few kinds, trying every subset of columns, with zeros for the others, is exact and quick.
    for chosen in chain.from_iterable(combinations(range(kinds), n) for n in range(1, kinds + 1)):
        part, *_ = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)
        if (part < 0).any():
            continue
        found = np.zeros(kinds)
        found[list(chosen)] = part
        left = matrix @ found - target
        if float(left @ left) < least:
            best, least = found, float(left @ left)
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationJob:
    """The sizes of READs and copies that a calibration measures, and the number of its rounds."""

    repeats: int = 9
    transports: str | None = None
    # Descriptor sizes in bytes. One READ is measured per size.
    read_sizes: tuple[int, ...] = tuple(1 << n for n in range(10, 23, 2))
    # `read_bytes`, `read_descriptors`: maximum of a READ. The latter limits READs with short descriptors.
    read_bytes: int = 64 << 20
    read_descriptors: int = 8192
    runs: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    cells: tuple[int, ...] = (16 << 10, 64 << 10, 256 << 10)
    copy_bytes: int = LARGEST_SEGMENT_BYTES
    device: str = "cpu"  # where the KV is: ``cpu``, ``cuda``, or ``auto`` for ``cuda`` if there is a GPU
    # Run lengths of copies between GPU and host memory, in bytes, ascending.
    host_runs: tuple[int, ...] = tuple(1 << n for n in range(14, 23))
    host_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """The costs by which the planner chooses a transfer method, and the fits that they come from."""

    costs: Costs
    reads: Fit
    copies: Fit
    ask: Spread  # seconds from the request for a gather to the answer


def calibrate(job: CalibrationJob, progress: Callable[[str], None]) -> CalibrationResult:
    """Measure READs and copies on this machine, and fit the transfer planner's costs to the timings.

    Raises:
        ConfigError: memory cannot be allocated, NIXL cannot be used, or there is no such device.
        TransferError: the second process died, or a transfer failed.
    """
    there, here = source_and_destination(job.device)
    settings = use_transports(job.transports)
    progress("starting the producer process")
    src, dst = (
        plain_engine("source", job.read_bytes, there),
        plain_engine("destination", job.read_bytes, here),
    )
    with ProducerProcess([src], settings) as producer, Reader(dst, producer) as reader:
        progress("reading descriptors of several sizes")
        with closing(RawReads(reader)) as raw:
            reads = _reads(job, raw, reader.cache.buffer.nbytes)
            progress("reading with several lanes")
            work, byte_gain = (
                _lanes_gain(job, reader, raw, run, min(job.read_bytes, reader.cache.buffer.nbytes))
                for run in _LANE_RUNS
            )
            progress("asking for gathers")
            with closing(_GatherChannel(reader)) as channel:
                # The first request also connects, so it does not count.
                ask = Spread.of([channel.time(_SMALL) for _ in range(10 * job.repeats + 1)][1:])
                overlap = _overlap(job, channel, raw, reader.cache.buffer.nbytes // 2)
    progress("copying runs of several lengths")
    copies = _copies(job, here)
    engine_bytes = float(COPY_ENGINE_BYTES)
    if here != "cpu":
        progress("copying between GPU and host memory")
        engine_bytes = _copy_engine_bytes(job, here)
    read_descriptor, read_byte = reads.costs.tolist()
    call, run, byte = copies.costs.tolist()
    costs = Costs(
        read_descriptor_seconds=read_descriptor,
        read_byte_seconds=read_byte,
        copy_call_seconds=call,
        copy_run_seconds=run,
        copy_byte_seconds=byte,
        ask_seconds=ask.median,
        overlap=overlap,
        lanes_work_gain=work,
        lanes_byte_gain=byte_gain,
        copy_engine_bytes=engine_bytes,
    )
    return CalibrationResult(costs, reads, copies, ask)


def _reads(job: CalibrationJob, raw: RawReads, room: int) -> Fit:
    lists = []
    for size in job.read_sizes:
        count = min(job.read_descriptors, min(job.read_bytes, room) // size)
        if count:
            lists.append(raw.equal_descriptors(count * size, size))
    seconds = np.median(run_rounds([partial(raw.read, made) for made in lists], job.repeats), axis=1)
    work = np.array([[len(made.indices.src), made.bytes] for made in lists], np.float64)
    return fit(work, seconds)


def _lanes_gain(job: CalibrationJob, reader: Reader, agent: RawReads, run: int, room: int) -> float:
    """Return how many times faster all lanes of a worker are together than a single one.

    Args:
        agent: NIXL agent of the first lane. A new agent is created for each other lane.
        room: maximum number of bytes that one measurement reads.
    """
    lanes, size = TransferSettings().lanes, min(room, run * job.read_descriptors)
    with ExitStack() as stack:
        others = [stack.enter_context(closing(RawReads(reader))) for _ in range(lanes - 1)]
        enter = partial(enter_stream, reader.cache.geometry.regions[0])
        threads = stack.enter_context(ThreadPoolExecutor(lanes, initializer=enter))
        parts = [(raw, raw.equal_descriptors(size // lanes, run)) for raw in (agent, *others)]
        whole = agent.equal_descriptors(size, run)

        def together() -> float:
            started = time.perf_counter()
            for read in [threads.submit(raw.read, lists) for raw, lists in parts]:
                read.result()
            return time.perf_counter() - started

        one, all_of_them = np.array(run_rounds([partial(agent.read, whole), together], 3 * job.repeats))
    # Outside of this range the ratio is noise, and would mislead the planner.
    return float(np.clip(np.median(one / all_of_them), 1, lanes))


def _copies(job: CalibrationJob, device: str) -> Fit:
    copies = [
        copy
        for run in job.runs
        for cell in job.cells
        if cell >= run
        for copy in (_Copy(run, cell, job.copy_bytes, side, device) for side in ("src", "dst"))
    ]
    seconds = np.median(run_rounds([copy.run for copy in copies], job.repeats), axis=1)
    return fit(np.array([copy.work for copy in copies], np.float64), seconds)


class _Copy:
    """Copies cells between a pool of blocks and contiguous memory in random order, and measures the time.

    In the pool, each cell consists of runs, and the gap between two runs is as long as a run.

    Args:
        run, cell: bytes of a run, and of a cell, which is a multiple of it.
        size: number of bytes to copy; rounded down to whole cells, but at least one cell.
        side: ``src`` to copy out of the pool (gather), ``dst`` to copy into the pool (scatter).

    Attributes:
        work: numbers of cells, of runs and of bytes that one copy moves, in this order.
    """

    def __init__(self, run: int, cell: int, size: int, side: str, device: str) -> None:
        cells = max(1, size // cell)
        runs = cell // run
        pool, images = (
            torch.zeros(cells * cell * factor, dtype=torch.uint8, device=device) for factor in (2, 1)
        )
        regions = [region_over(memory) for memory in (pool, images)]
        there, here = regions[0].address, 0
        loops = (Loop(runs, 2 * run, run),) if runs > 1 else ()
        strided = StridedCopy(there, here, run, loops)
        if side == "dst":
            strided = StridedCopy(
                here, there, run, tuple(Loop(loop.count, loop.dst, loop.src) for loop in loops)
            )
        self._keep = pool, images
        self._loops = StagingCopies(
            [PoolCopies(ONE_CELL, (strided,))], AddressSpace(regions[:1]), side, 2 * cell, cells
        )
        self._slots = StagedImages(AddressSpace(regions[1:]), regions[1].address, cell)
        self._blocks = np.random.default_rng(5).permutation(cells)
        self._gathers = side == "src"
        self.work = (cells, cells * runs, cells * cell)

    def run(self) -> float:
        copy = self._loops.gather if self._gathers else self._loops.scatter
        started = time.perf_counter()
        copy(self._blocks, self._blocks, self._slots, 0)
        return time.perf_counter() - started


def _copy_engine_bytes(job: CalibrationJob, device: str) -> float:
    """Measure the length of the shortest run that the GPU's copy engine copies faster than the kernel."""
    copies = [
        HostCopy(run, job.host_bytes, device, engine_bytes=limit)
        # Never the copy engine, and always.
        for limit in (1 << 40, 1)
        for run in job.host_runs
    ]
    seconds = np.median(run_rounds([copy.store for copy in copies], job.repeats), axis=1)
    kernel, engine = seconds.reshape(2, -1).tolist()
    return float(shortest_engine_run(job.host_runs, kernel, engine))


class _GatherChannel:
    """A connection over which the reader requests gathers from the producer, an engine with one rank."""

    def __init__(self, reader: Reader) -> None:
        (card,) = reader.cards[0]
        if card.outgoing is None:
            raise TransferError("the producer process does not gather: please report this")
        self._reader = reader
        pool = card.geometry.regions[0]
        first, room = pool.address, min(pool.length, card.outgoing.bytes // 2) // 2 // _LARGE_RUN * _LARGE_RUN
        small = StridedCopy(first, 0, _SMALL_RUN)
        # Gather every second run of the first blocks, up to the largest size of one gather.
        runs = max(2, room // _LARGE_RUN)
        large = StridedCopy(first, 0, _LARGE_RUN, (Loop(runs, 2 * _LARGE_RUN, _LARGE_RUN),))
        routes = [
            GatherRoute(_SMALL_RUN, 2, _SMALL_RUN, (PoolCopies(ONE_CELL, (small,)),)),
            GatherRoute(_SMALL_RUN, 2, runs * _LARGE_RUN, (PoolCopies(ONE_CELL, (large,)),)),
        ]
        self._context: zmq.Context[Any] = zmq.Context()
        self._client = GatherClient(
            self._context, card.outgoing.host, card.outgoing.port, routes, reader.producer.keys
        )
        self._lease = reader.claim_lease("asking")

    def close(self) -> None:
        self._client.close()
        self._context.destroy(linger=0)
        self._reader.acknowledge("asking")

    def time(self, route: int, meanwhile: Callable[[], object] = lambda: None) -> float:
        """Request a gather, and return the seconds until the answer.

        Args:
            route: `_SMALL` for a gather of 64 bytes, `_LARGE` for one of runs of 2048 bytes.
            meanwhile: called between sending the request and waiting for the answer. Its time counts.
        """
        limit = WaitLimit(self._reader.producer.check)
        started = time.perf_counter()
        chunk = self._client.ask(route, self._lease, np.ones(1, np.int64), np.zeros(1, np.int64))
        meanwhile()
        while (answer := self._client.answer(chunk)) is None:
            limit.check()
            self._client.socket.poll(1)
        seconds = time.perf_counter() - started
        if not isinstance(answer, Gathered):
            raise TransferError(f"the producer process did not gather: {answer}")
        self._client.done(chunk)
        return seconds


def _overlap(job: CalibrationJob, channel: _GatherChannel, raw: RawReads, size: int) -> float:
    """Measure the saved share (0 to 1) of the shorter time if a gather and a READ of `size` bytes overlap."""
    lists = raw.equal_descriptors(size)
    timed: list[Callable[[], float]] = [
        partial(channel.time, _LARGE),
        partial(raw.read, lists),
        lambda: channel.time(_LARGE, lambda: raw.read(lists)),
    ]
    gather, read, both = np.array(run_rounds(timed, 3 * job.repeats))
    return float(np.clip(np.median((gather + read - both) / np.minimum(gather, read)), 0, 1))
