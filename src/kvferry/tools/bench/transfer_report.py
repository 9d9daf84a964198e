"""The report of `kvferry bench transfer`, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvferry.tools.bench.rounds import MoverRounds, TransferComparison
from kvferry.tools.bench.transfer import MeasuredTransfer
from kvferry.tools.measuring.spread import Spread
from kvferry.report import Report
from kvferry.table import Column
from kvferry.units import format_bytes

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


def show(measured: MeasuredTransfer, report: Report) -> None:
    """Print the results of `kvferry bench transfer`: the work, the machine, and a table of all methods."""
    _show_job(measured, report)
    _show_comparison(measured.comparison, report)


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


def _show_job(measured: MeasuredTransfer, report: Report) -> None:
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


def _show_comparison(comparison: TransferComparison, report: Report) -> None:
    rows = [(*_series(comparison.ferry), "", "")]
    rows += [(*_series(one), *_ratio(comparison.ferry.speed_ratio(one))) for one in comparison.others]
    report.text()
    report.table(COLUMNS, rows)
    report.text()
    report.note("Ratio: kvferry's speed divided by the other's, round by round.")
    # Larger descriptors are out of kvferry's reach: the engines' pages are as long as they are.
    reached = comparison.ferry.speed_ratio(comparison.others[SAME_DESCRIPTORS]).median
    planning, reading, check, rest = comparison.stages
    good = reached >= TARGET_RATIO
    report.text(
        f"kvferry at {reached:.2f} of raw NIXL with the same descriptors (target {TARGET_RATIO}): "
        f"{'reached' if good else 'missed'}",
        "green" if good else "red",
    )
    report.text(
        f"its time: planning {_ms(planning)}, reading {_ms(reading)}, lease check {_ms(check)}, "
        f"hand-over and acknowledgement {_ms(rest)}"
    )


def _series(series: MoverRounds) -> tuple[str, str, str, str]:
    speed = series.gigabytes_per_second
    return (
        series.name,
        f"{speed.median:.2f} GB/s",
        f"{speed.low:.2f}-{speed.high:.2f}",
        f"{Spread.of(series.seconds).median * 1e3:.1f} ms",
    )


def _ratio(spread: Spread) -> tuple[str, str]:
    return f"{spread.median:.2f}", f"{spread.low:.2f}-{spread.high:.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
