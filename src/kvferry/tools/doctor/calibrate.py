"""Measure the costs of transfers on this machine, and write them for the transfer planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvferry.tools.doctor.finding import Finding, from_error, ok
from kvferry.errors import KVFerryError
from kvferry.tools.measuring.machine import machine_facts
from kvferry.planning.strategy import Costs
from kvferry.transport.costs_file import default_costs_path, write_costs
from kvferry.user_cache import expanded

if TYPE_CHECKING:
    from kvferry.tools.measuring.calibrate import CalibrationResult

# Meaning, scale and unit of each field of `Costs`.
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


def _measure(progress: Callable[[str], None]) -> CalibrationResult:
    from kvferry.tools.measuring.calibrate import (  # noqa: PLC0415 - loads torch and NIXL
        CalibrationJob,
        calibrate,
    )

    return calibrate(CalibrationJob(device="auto"), progress)


def calibrate(
    path: str | None,
    progress: Callable[[str], None],
    measure: Callable[[Callable[[str], None]], CalibrationResult] = _measure,
) -> Iterable[Finding]:
    """Measure the costs of transfers, write them to a file, and yield findings with the values.

    Args:
        path: costs file that the configuration names; None for the user's default file.
        progress: called with a short text before each step.
        measure: measures the costs.
    """
    try:
        found = measure(progress)
        file = expanded(path) if path else default_costs_path()
        write_costs(file, found.costs, datetime.now(UTC).isoformat(timespec="seconds"), _facts(found))
    except KVFerryError as error:
        yield from_error("calibration", error, "run kvferry doctor, and repair what it finds")
        return
    yield from describe(found)
    yield ok("costs file", f"written to {file}; engines read it when they start")


def describe(found: CalibrationResult) -> Iterable[Finding]:
    """Yield a finding for each cost, and one on how well the costs predict the measured times."""
    built_in = Costs()
    for name, (what, scale, unit) in _WHAT.items():
        here, there = (
            f"{getattr(costs, name) * scale:.3g} {unit}".strip() for costs in (found.costs, built_in)
        )
        yield ok(what, f"{here}; built in: {there}")
    yield ok(
        "prediction",
        "; ".join(
            f"{len(fitted.errors)} kinds of {what} within {fitted.median_error:.0%} (median), "
            f"{fitted.worst_error:.0%} (worst)"
            for what, fitted in (("reads", found.reads), ("copies", found.copies))
        ),
    )


def _facts(found: CalibrationResult) -> dict[str, object]:
    """Return what is stored with the costs: the machine and the errors of the fits."""
    errors = {
        what: {"median": fitted.median_error, "worst": fitted.worst_error}
        for what, fitted in (("reads", found.reads), ("copies", found.copies))
    }
    return {**asdict(machine_facts()), "errors": errors}
