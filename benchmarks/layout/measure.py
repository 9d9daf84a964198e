"""`benchmarks layout`: measure the effect of memory layout, tensor parallelism and strategy on a transfer.

One process runs an engine with all its ranks for each layout and parallel size. The other process reads as
one rank of an engine for each layout and parallel size. All of them run at the same time, so that every round
moves every cell with every method.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from math import lcm

import numpy as np

from benchmarks.hosts import LinkedHost, on_linked_hosts, start_producer
from benchmarks.layout.cells import CHOSEN, METHODS, Cell, LayoutRow, LayoutTable, runs_of
from benchmarks.overhead import planning
from kvferry.common.errors import ConfigError, GeometryError
from kvferry.geometry import GroupKind
from kvferry.planning.select import needed_tokens
from kvferry.planning.strategy import Strategy
from kvferry.tools.bench.movers import KVFerryMover, Mover, raw_nixl
from kvferry.tools.bench.rounds import MoverRounds
from kvferry.tools.measuring.producer_process import ProducerProcess, use_transports
from kvferry.tools.measuring.raw_reads import RawReads
from kvferry.tools.measuring.reader import Reader
from kvferry.tools.measuring.rounds import run_rounds
from kvferry.tools.measuring.simulated import SimulatedEngine, simulate_engine, span_of
from kvferry.tools.models import ModelReading
from kvferry.tools.plan.setting import split_k_and_v
from kvferry.tools.plan.side import EngineSide, block_tokens
from kvferry.transport.costs import TransferSettings, load_costs

LAYOUTS = ("LBNHC", "LBHNC", "BLHNC", "BHLNC")
PARALLEL = ((1, 1), (2, 1), (1, 2), (4, 2))
MOVED_BYTES = 128 << 20
PLANNED_TOKENS = 131_072
RAW_EVERY = 8
"""Number of moves by kvferry in a round for each move by raw NIXL."""
_POLL_SECONDS = 2e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutJob:
    """The cells to measure.

    Attributes:
        layouts: memory layouts.
        parallel: pairs of tensor-parallel sizes of the source and of the reader.
        repeats: number of counted rounds.
        tokens: length of the request in tokens; None for a request of about `MOVED_BYTES`.
        transports: value of UCX_TLS; None to leave it unchanged.
        lanes: number of reading threads.
        planned_tokens: length of the request whose planning is timed, in tokens.
        gigabits: rate in Gbit/s of a link between the two processes, over TCP, 0 for no limit; None if they
            are on one host.
    """

    layouts: tuple[str, ...] = LAYOUTS
    parallel: tuple[tuple[int, int], ...] = PARALLEL
    repeats: int = 9
    tokens: int | None = None
    transports: str | None = None
    lanes: int = 2
    planned_tokens: int = PLANNED_TOKENS
    gigabits: float | None = None


def measure(job: LayoutJob, reading: ModelReading, progress: Callable[[str], None]) -> LayoutTable:
    """Move one request of a model in every cell with every method, and return the results.

    Args:
        job: cells to measure.
        reading: description of the model's KV cache.
        progress: function that is called with a line of text before each step.

    Raises:
        ConfigError: no cell is possible, or memory or NIXL cannot be used.
        TransferError: the other process died, or wrong bytes arrived.
    """
    transfer = TransferSettings(costs=load_costs(), lanes=job.lanes)
    if job.gigabits is None:
        settings = use_transports(job.transports)
        return _measure(job, reading, progress, lambda engines: ProducerProcess(engines, settings), transfer)
    # Both hosts are one machine. kvferry would share memory with a process of it that it reads slowly.
    linked = partial(_measure_linked, job, reading, progress, replace(transfer, timed_read_bytes=0))
    table: LayoutTable = on_linked_hosts(linked)
    return table


def _measure_linked(
    job: LayoutJob,
    reading: ModelReading,
    progress: Callable[[str], None],
    transfer: TransferSettings,
    there: LinkedHost,
    here: LinkedHost,
) -> LayoutTable:
    for host in (there, here):
        host.limit(job.gigabits or 0)
    os.environ.update(here.network)
    return _measure(job, reading, progress, partial(start_producer, there, here), transfer)


def _measure(
    job: LayoutJob,
    reading: ModelReading,
    progress: Callable[[str], None],
    start: Callable[[Sequence[SimulatedEngine]], ProducerProcess],
    transfer: TransferSettings,
) -> LayoutTable:
    tokens = moved_tokens(job, reading)
    found = _Engines.of(job, reading, tokens)
    with ExitStack() as stack:
        progress(f"{reading.cache.name}: starting the producer process")
        producer = stack.enter_context(start(list(found.sources.values())))
        peers = {key: number for number, key in enumerate(found.sources)}
        readers: dict[tuple[str, int], Reader] = {}
        for key, dst in found.destinations.items():
            read = [peers[c.layout, c.src_tp] for c in found.cells if (c.layout, c.dst_tp) == key]
            readers[key] = stack.enter_context(Reader(dst, producer, read, settings=transfer))
        ferries = {
            (cell, way): KVFerryMover(
                f"{cell} {way}",
                readers[cell.layout, cell.dst_tp],
                found.sources[cell.layout, cell.src_tp],
                peer=peers[cell.layout, cell.src_tp],
                strategy=None if way == CHOSEN else Strategy(way),
                poll_seconds=_POLL_SECONDS,
            )
            for cell in found.cells
            for way in METHODS
        }
        largest = max(readers.values(), key=lambda reader: reader.bytes)
        raw = stack.enter_context(closing(RawReads(largest, next(iter(largest.cards)))))
        lists = raw.equal_descriptors(largest.cache.buffer.nbytes)
        raws = [raw_nixl("raw NIXL", raw, lists) for _ in range(-(-len(ferries) // RAW_EVERY))]
        movers: list[Mover] = [*ferries.values(), *raws]
        times = run_rounds(
            [mover.move for mover in movers],
            job.repeats,
            lambda said: progress(f"{reading.cache.name}: {said}"),
        )
    speed = [lists.bytes / float(np.median(s)) / 1e9 for s in zip(*times[len(ferries) :], strict=True)]
    series = {
        key: MoverRounds(ferry.name, ferry.bytes, tuple(seconds))
        for (key, ferry), seconds in zip(ferries.items(), times, strict=False)
    }
    progress(f"{reading.cache.name}: planning {job.planned_tokens:,} tokens")
    rows = [
        _row(
            job,
            reading,
            cell,
            found,
            ways={way: series[cell, way] for way in METHODS},
            chosen=ferries[cell, CHOSEN],
            speed=speed,
        )
        for cell in found.cells
    ]
    return LayoutTable(
        model=reading.cache.name,
        tokens=tokens,
        raw=tuple(speed),
        rows=tuple(rows),
        left_out=tuple(found.left_out),
    )


def k_and_v_apart(reading: ModelReading) -> ModelReading:
    """Return a description of a model whose engines keep K and V of each layer on pages of their own."""
    split, _ = split_k_and_v(reading)
    return replace(split, cache=replace(split.cache, name=f"{reading.cache.name}, K and V apart"))


def moved_tokens(job: LayoutJob, reading: ModelReading) -> int:
    """Return the length of the request in tokens: a multiple of the block size of every engine."""
    step = lcm(*(_block_tokens(reading, tp) for tp in {tp for pair in job.parallel for tp in pair}))
    if job.tokens is not None:
        return -(-job.tokens // step) * step
    tokens = step
    while _bytes(reading, tokens + step) <= MOVED_BYTES:
        tokens += step
    return tokens


def _block_tokens(reading: ModelReading, tp: int) -> int:
    """Return the block size of an engine with `tp` ranks, in tokens; 1 if no such engine is possible."""
    try:
        return block_tokens(reading, EngineSide(tp=tp))[0]
    except GeometryError:
        return 1


def _bytes(reading: ModelReading, tokens: int) -> int:
    """Return the number of bytes of a request, over all ranks."""
    total = 0
    for store in reading.cache.layers:
        low, high = needed_tokens(store, span_of(tokens))
        total += store.whole_bytes * (1 if store.kind is GroupKind.STATE else high - low)
    return total


@dataclass(frozen=True, slots=True)
class _Engines:
    """The engines of all cells.

    Attributes:
        sources, destinations: engines that are read from and that read, by layout and number of ranks.
        cells: possible cells.
        left_out: impossible cells, with the reason.
    """

    sources: dict[tuple[str, int], SimulatedEngine] = field(default_factory=dict)
    destinations: dict[tuple[str, int], SimulatedEngine] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    @staticmethod
    def of(job: LayoutJob, reading: ModelReading, tokens: int) -> _Engines:
        found = _Engines()
        for layout in job.layouts:
            for pair in job.parallel:
                found.add(Cell(layout, *pair), reading, tokens)
        if not found.cells:
            raise ConfigError("; ".join(f"{cell}: {why}" for cell, why in found.left_out))
        return found

    def add(self, cell: Cell, reading: ModelReading, tokens: int) -> None:
        try:
            src, dst = pair_of(cell, reading, tokens)
        except GeometryError as error:
            self.left_out.append((str(cell), str(error)))
            return
        self.sources.setdefault((cell.layout, cell.src_tp), src)
        self.destinations.setdefault((cell.layout, cell.dst_tp), dst)
        self.cells.append(cell)


def pair_of(cell: Cell, reading: ModelReading, tokens: int) -> tuple[SimulatedEngine, SimulatedEngine]:
    """Return the engines of a cell: the source and the destination.

    Raises:
        GeometryError: one of the engines is impossible for this model.
    """
    src, dst = (
        simulate_engine(
            f"{cell.layout}/{tp}", reading, EngineSide(tp=tp, layout=cell.layout), tokens, seed=seed
        )
        for seed, tp in ((1, cell.src_tp), (2, cell.dst_tp))
    )
    return src, dst


def _row(
    job: LayoutJob,
    reading: ModelReading,
    cell: Cell,
    found: _Engines,
    *,
    ways: dict[str, MoverRounds],
    chosen: KVFerryMover,
    speed: Sequence[float],
) -> LayoutRow:
    src, dst = found.sources[cell.layout, cell.src_tp], found.destinations[cell.layout, cell.dst_tp]
    ratios = {
        way: tuple(s.bytes / t / 1e9 / raw for t, raw in zip(s.seconds, speed, strict=True))
        for way, s in ways.items()
    }
    step = lcm(src.shape.block_tokens, dst.shape.block_tokens)
    long = pair_of(cell, reading, -(-job.planned_tokens // step) * step)
    planned = planning.measure(*long, max(5, np.size(speed)), lanes=job.lanes)
    strategy = "+".join(dict.fromkeys(s for s in chosen.strategies if s))
    return LayoutRow(
        cell=cell, runs=runs_of(src, dst), strategy=strategy, ways=ways, ratios=ratios, planning=planned
    )
