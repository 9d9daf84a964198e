"""The report of `kvferry bench calibrate`, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvferry.bench.calibrate import CalibrationResult
from kvferry.bench.fit import Fit
from kvferry.measuring.machine import MachineFacts
from kvferry.planning.strategy import Costs
from kvferry.report import Report
from kvferry.table import Column

_WHAT = {
    "read_descriptor_seconds": ("READ, per descriptor", 1e6, "µs"),
    "read_byte_seconds": ("READ, per byte", 1e12, "ps"),
    "copy_call_seconds": ("gather or scatter, per call", 1e6, "µs"),
    "copy_run_seconds": ("gather or scatter, per run", 1e9, "ns"),
    "copy_byte_seconds": ("gather or scatter, per byte", 1e12, "ps"),
    "ask_seconds": ("request for a gather", 1e6, "µs"),
    "lanes_work_gain": ("gain of more lanes, short runs", 1, ""),
    "lanes_byte_gain": ("gain of more lanes, long runs", 1, ""),
    "copy_engine_bytes": ("shortest run for a GPU's copy engine", 2**-10, "KiB"),
    "overlap": ("gathering hidden behind reading", 1e2, "%"),
}

COLUMNS = (Column("what", left=True), Column("measured"), Column("built in", rank=1))
"""Columns of the table of costs."""


def facts(machine: MachineFacts, found: CalibrationResult) -> dict[str, Any]:
    """Return the values that are stored with the costs: the machine's properties and the errors of the fits.

    Args:
        machine: properties of the machine.
        found: result of the calibration on this machine.
    """
    return {**asdict(machine), "errors": {"reads": _errors(found.reads), "copies": _errors(found.copies)}}


def as_json(found: CalibrationResult, facts: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """Return the result of a calibration as values that can be written as JSON.

    The values are the costs, the time of a gather request, the machine, and the path of the costs file.

    Args:
        found: result of the calibration.
        facts: properties of the machine and errors of the fits, as returned by the function `facts`.
        path: path of the written costs file; None if no file was written.
    """
    return {
        "costs": asdict(found.costs),
        "ask_seconds": asdict(found.ask),
        "machine": facts,
        "written": None if path is None else str(path),
    }


def show(found: CalibrationResult, report: Report) -> None:
    """Print the result of a calibration: a table of the costs, and the errors of the fits.

    Args:
        found: result of the calibration.
        report: report to print to.
    """
    built_in = Costs()
    rows = []
    for name, (what, scale, unit) in _WHAT.items():
        values = (f"{getattr(costs, name) * scale:.3g} {unit}" for costs in (found.costs, built_in))
        rows.append((what, *(value.strip() for value in values)))
    report.table(COLUMNS, rows)
    report.text()
    for what, fitted in (("reads", found.reads), ("copies", found.copies)):
        report.text(
            f"{len(fitted.errors)} kinds of {what} are predicted within {fitted.median_error:.0%} (median), "
            f"{fitted.worst_error:.0%} (worst)"
        )


def _errors(fitted: Fit) -> dict[str, float]:
    return {"median": fitted.median_error, "worst": fitted.worst_error}
