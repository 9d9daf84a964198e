"""`kvferry bench transfer`: measure the transfer of one request between two processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from kvferry.common.units import format_bytes
from kvferry.tools.bench.movers import KVFerryMover, Mover, memcpy, raw_nixl
from kvferry.tools.bench.rounds import MoverRounds, measure_movers
from kvferry.tools.measuring.producer_process import ProducerProcess, use_transports
from kvferry.tools.measuring.raw_reads import RawReads
from kvferry.tools.measuring.reader import Reader
from kvferry.tools.measuring.rounds import MachineFacts, Spread, machine_facts
from kvferry.tools.measuring.simulated import SimulatedEngine, simulate_engine
from kvferry.tools.models import ModelReading
from kvferry.tools.models.layout import lay_out
from kvferry.tools.plan.side import EngineSide
from kvferry.tools.report import Column, Report

# Index in `TransferComparison.others` of raw NIXL with the same descriptors as kvferry.
SAME_DESCRIPTORS = 1
TARGET_RATIO = 0.9

COLUMNS = (
    Column("moved by", left=True),
    Column("speed"),
    Column("range of speed", rank=3),
    Column("time", rank=2),
    Column("ratio"),
    Column("range of ratio", rank=1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferJob:
    """The request whose KV `kvferry bench transfer` moves, and the settings of the measurement.

    Attributes:
        transports: value of UCX_TLS, UCX's list of transports; None to leave it unchanged.
    """

    reading: ModelReading
    side: EngineSide
    tokens: int
    order: str
    repeats: int
    transports: str | None = None


@dataclass(frozen=True, slots=True)
class TransferComparison:
    """The times of moving one request's KV with kvferry, with NIXL alone, and with memcpy.

    Attributes:
        others: times of NIXL alone with large descriptors, of NIXL alone with the same descriptors as
            kvferry, and of memcpy, in this order.
        stages: median seconds of kvferry's planning, of its reading, of its lease check, and of the rest.
    """

    ferry: MoverRounds
    others: tuple[MoverRounds, ...]
    stages: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTransfer:
    """The results of `kvferry bench transfer`."""

    job: TransferJob
    blocks: int
    layers: int
    page_bytes: int
    machine: MachineFacts
    comparison: TransferComparison


def measure(job: TransferJob, progress: Callable[[str], None]) -> MeasuredTransfer:
    """Move a request's KV between two processes with kvferry, NIXL alone and memcpy, and return the times.

    Raises:
        ConfigError: memory cannot be allocated, or NIXL cannot be used.
        TransferError: the second process died, or a transfer failed.
    """
    settings = use_transports(job.transports)
    progress("starting the producer process")
    src, dst = (
        # Other seeds, so that block ids differ as between two engines.
        simulate_engine(name, job.reading, job.side, job.tokens, order=job.order, seed=seed)
        for seed, name in enumerate(("source", "destination"), 1)
    )
    with ProducerProcess([src], settings) as producer, Reader(dst, producer) as reader:
        comparison = _compare(reader, src, job.repeats, progress)
    (group,) = lay_out(dst.model, dst.shape)[0].groups
    return MeasuredTransfer(
        job=job,
        blocks=dst.blocks,
        layers=len(group.layers),
        page_bytes=group.layers[0].page.page_bytes,
        machine=machine_facts(),
        comparison=comparison,
    )


def _compare(
    reader: Reader, source: SimulatedEngine, repeats: int, progress: Callable[[str], None]
) -> TransferComparison:
    ferry = KVFerryMover("kvferry", reader, source)
    with closing(RawReads(reader)) as raw:
        movers: list[Mover] = [
            ferry,
            raw_nixl("(a) raw NIXL, 2 MiB descriptors", raw, raw.equal_descriptors(ferry.bytes)),
            raw_nixl("(b) raw NIXL, same descriptors", raw, raw.same_descriptors(source)),
            memcpy(reader),
        ]
        ours, *others = measure_movers(movers, repeats, progress)
    planning, reading, check, rest = (
        # The first round does not count, as in `run_rounds`.
        Spread.of(column).median
        for column in zip(*ferry.stages[1:], strict=True)
    )
    return TransferComparison(ours, tuple(others), (planning, reading, check, rest))


def show(measured: MeasuredTransfer, report: Report) -> None:
    """Print the results of `kvferry bench transfer`: the work, the machine, and a table of all methods."""
    job, machine, pages = measured.job, measured.machine, measured.blocks * measured.layers
    report.heading(job.reading.cache.name)
    report.text(
        f"{job.tokens:,} tokens in {measured.blocks:,} {job.order} blocks x {measured.layers} layers = "
        f"{pages:,} pages of {format_bytes(measured.page_bytes)}, {format_bytes(pages * measured.page_bytes)}"
    )
    transports = "not set" if machine.transports is None else machine.transports
    report.text(
        f"{machine.cores} cores, {machine.cpu}, UCX_TLS {transports}; two processes; "
        f"median and range of {job.repeats} interleaved rounds"
    )
    comparison = measured.comparison
    rows = [(*_series(comparison.ferry), "", "")]
    for one in comparison.others:
        ratio = comparison.ferry.speed_ratio(one)
        rows.append((*_series(one), f"{ratio.median:.2f}", f"{ratio.low:.2f}-{ratio.high:.2f}"))
    report.text()
    report.table(COLUMNS, rows)
    report.text()
    report.note("Ratio: kvferry's speed divided by the other's, round by round.")
    # Larger descriptors are out of kvferry's reach: the engines' pages are as long as they are.
    reached = comparison.ferry.speed_ratio(comparison.others[SAME_DESCRIPTORS]).median
    good = reached >= TARGET_RATIO
    report.text(
        f"kvferry at {reached:.2f} of raw NIXL with the same descriptors (target {TARGET_RATIO}): "
        f"{'reached' if good else 'missed'}",
        "green" if good else "red",
    )
    planning, reading, check, rest = (f"{seconds * 1e3:.3g} ms" for seconds in comparison.stages)
    report.text(
        f"its time: planning {planning}, reading {reading}, lease check {check}, "
        f"hand-over and acknowledgement {rest}"
    )


def _series(series: MoverRounds) -> tuple[str, str, str, str]:
    speed = series.gigabytes_per_second
    return (
        series.name,
        f"{speed.median:.2f} GB/s",
        f"{speed.low:.2f}-{speed.high:.2f}",
        f"{Spread.of(series.seconds).median * 1e3:.1f} ms",
    )


def as_json(measured: MeasuredTransfer) -> dict[str, Any]:
    """Return the results as values for JSON: seconds and bytes of every round, speeds and ratios."""
    comparison, job = measured.comparison, measured.job
    whole = {
        "geometry": job.reading.cache.name,
        **{name: getattr(job, name) for name in ("tokens", "order", "repeats", "transports")},
        **{name: getattr(measured, name) for name in ("blocks", "layers", "page_bytes")},
        **{name: asdict(getattr(measured, name)) for name in ("machine", "comparison")},
    }
    whole["gigabytes_per_second"] = {
        series.name: asdict(series.gigabytes_per_second) for series in (comparison.ferry, *comparison.others)
    }
    whole["kvferry_as_multiple_of"] = {
        series.name: asdict(comparison.ferry.speed_ratio(series)) for series in comparison.others
    }
    return whole
