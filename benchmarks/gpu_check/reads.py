"""READs between two processes: bytes and speed, by each strategy, with one lane and with all lanes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np

from benchmarks.gpu_check.job import GpuCheckJob
from benchmarks.gpu_check.result import CheckResult, Figure, judged, ratio_figure
from kvferry.planning.strategy import Strategy
from kvferry.tools.bench.movers import CallMover, KVFerryMover, raw_nixl
from kvferry.tools.measuring.gpus import source_and_destination
from kvferry.tools.measuring.producer_process import ProducerProcess
from kvferry.tools.measuring.raw_reads import RawReads
from kvferry.tools.measuring.reader import Reader
from kvferry.tools.measuring.simulated import SimulatedEngine, read_geometry, simulate_engine
from kvferry.tools.plan.side import EngineSide
from kvferry.transport.costs import TransferSettings

_LAYOUTS = {"same layout": "LBHNC", "other order of heads and tokens": "LBNHC", "layers together": "BLHNC"}
_STRATEGIES = {
    "same layout": [Strategy.DIRECT, Strategy.SHARED],
    "other order of heads and tokens": [Strategy.STAGED, Strategy.OVER_READ],
    "layers together": [Strategy.STAGED],
}


def check_reads(job: GpuCheckJob) -> CheckResult:
    """Read a request from another process in every way, and compare every byte.

    Args:
        job: device and sizes.

    Raises:
        TransferError: a read failed, or wrong bytes arrived.
    """
    there, here = source_and_destination(job.device)
    sources = [_engine(job, f"source {i}", layout, there) for i, layout in enumerate(_LAYOUTS.values())]
    destination = _engine(job, "destination", "LBHNC", here)
    figures: list[Figure] = []
    with ProducerProcess(sources, {}) as producer:
        for lanes in (1, TransferSettings().lanes):
            settings = TransferSettings(lanes=lanes)
            with Reader(destination, producer, range(len(sources)), settings=settings) as reader:
                figures += _figures(job, sources, reader, lanes)
    where = f"from {there} to {here}, in two processes"
    return judged("READs", f"Every byte arrived, {where}.", figures)


def _figures(
    job: GpuCheckJob, sources: list[SimulatedEngine], reader: Reader, lanes: int
) -> Iterator[Figure]:
    with closing(RawReads(reader)) as raw:
        nixl = raw_nixl("NIXL", raw, raw.equal_descriptors(reader.bytes))
        fastest = _speed(job, nixl)
    yield Figure(f"NIXL alone, one agent, {reader.bytes >> 20} MiB", f"{fastest / 1e9:.1f} GB/s")
    for number, (name, strategies) in enumerate(_STRATEGIES.items()):
        for strategy in strategies:
            mover = KVFerryMover("", reader, sources[number], peer=number, strategy=strategy)
            speed = _speed(job, mover)
            label = f"{name}, {strategy}, {lanes} lane{'s' * (lanes > 1)}"
            yield Figure(label, f"{speed / 1e9:.1f} GB/s")
            yield ratio_figure(f"{label}: ratio to NIXL alone", speed / fastest, None)


def _speed(job: GpuCheckJob, mover: KVFerryMover | CallMover) -> float:
    seconds = [mover.move() for _ in range(job.repeats + 1)][1:]
    return mover.bytes / float(np.median(seconds))


def _engine(job: GpuCheckJob, name: str, layout: str, device: str) -> SimulatedEngine:
    reading = read_geometry("Llama-3.1-8B", {"num_hidden_layers": job.read_layers})
    made = simulate_engine(name, reading, EngineSide(layout=layout), job.read_tokens)
    return replace(made, device=device)
