"""The report of `benchmarks replay`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.replay.cases import READING, Measured
from kvferry.tools.measuring.rounds import Spread
from kvferry.tools.report import Column, Report

_MIB = 1 << 20


def show(found: Mapping[str, Sequence[Measured]], report: Report) -> None:
    """Print a table of the runs."""
    requests = next(iter(found.values()))[0].requests
    report.text(f"{requests:,} requests, {len(found[READING])} rounds, medians with the range:")
    reading = found[READING]
    report.table(
        [
            Column("simulation", left=True),
            Column("hit rate"),
            Column("CPU µs per request"),
            Column("ratio to reading"),
            Column("seconds for a million"),
            Column("peak MiB"),
        ],
        [
            [
                name,
                "" if (rate := runs[0].hit_rate) is None else f"{rate:.1%}",
                _text(microseconds := _microseconds(runs), 0),
                _text(_ratio(runs, reading), 1) if name != READING else "",
                f"{microseconds.median:,.0f}",
                f"{max(run.peak_bytes for run in runs) / _MIB:,.0f}",
            ]
            for name, runs in found.items()
        ],
    )


def as_json(found: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    """Return all runs as values for JSON, in seconds and bytes."""
    return {name: [asdict(run) for run in runs] for name, runs in found.items()}


def _microseconds(runs: Sequence[Measured]) -> Spread:
    return Spread.of([run.seconds / run.requests * 1e6 for run in runs])


def _ratio(runs: Sequence[Measured], others: Sequence[Measured]) -> Spread:
    return Spread.of([one.seconds / other.seconds for one, other in zip(runs, others, strict=True)])


def _text(spread: Spread, digits: int) -> str:
    return f"{spread.median:,.{digits}f} ({spread.low:,.{digits}f} to {spread.high:,.{digits}f})"
