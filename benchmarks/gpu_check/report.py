"""The report of `benchmarks gpu_check`, as Markdown and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.gpu_check.measure import GpuReport
from benchmarks.gpu_check.result import CheckState

_STAND_IN = " Memory of the CPU stands for a GPU's, so the speeds mean nothing."


def as_markdown(found: GpuReport) -> str:
    """Return the report as Markdown: a summary, then one section for each check."""
    lines = [
        "# KV on a GPU: what was checked",
        "",
        f"Device: {found.device}.{'' if found.on_gpu else _STAND_IN}",
        f"Software: {', '.join(f'{name} {version}' for name, version in found.software.items())}.",
        f"All checks took {found.seconds:.0f} s.",
        "",
        "| check | result |",
        "|---|---|",
        *(f"| {check.name} | {check.state} |" for check in found.checks),
    ]
    for check in found.checks:
        lines += ["", f"## {check.name}: {check.state}", "", check.says]
        if check.figures:
            lines += ["", "| figure | value | goal |", "|---|--:|---|"]
            lines += [
                f"| {one.what} | {one.value} | {_goal(one.goal, met=one.met)} |" for one in check.figures
            ]
    return "\n".join(lines) + "\n"


def as_json(found: GpuReport) -> dict[str, Any]:
    """Return the report as values for JSON."""
    return asdict(found)


def passed(found: GpuReport) -> bool:
    """Return True if no check failed."""
    return all(check.state is not CheckState.FAILED for check in found.checks)


def _goal(goal: str, *, met: bool) -> str:
    return goal and f"{goal}: {'met' if met else 'MISSED'}"
