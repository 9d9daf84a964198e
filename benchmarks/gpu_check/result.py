"""Results of checks: state and figures."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckState(StrEnum):
    """State of a check. A check that was not run says why."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value of a check.

    Attributes:
        what: what was measured.
        value: value with its unit.
        goal: goal in words; empty if there is none.
        met: whether the value meets the goal; True if there is none.
    """

    what: str
    value: str
    goal: str = ""
    met: bool = True


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: name of the check.
        state: whether it passed.
        says: one sentence: what was proved, what failed, or why it was not run.
        figures: measured values.
    """

    name: str
    state: CheckState
    says: str
    figures: tuple[Figure, ...] = ()


def judged(name: str, says: str, figures: list[Figure]) -> CheckResult:
    """Return the result of a check whose bytes were right: it passed if every goal is met.

    Args:
        name: name of the check.
        says: what was proved.
        figures: measured values.
    """
    missed = [figure.what for figure in figures if not figure.met]
    if missed:
        return CheckResult(
            name, CheckState.FAILED, f"{says} Missed goals: {', '.join(missed)}.", tuple(figures)
        )
    return CheckResult(name, CheckState.PASSED, says, tuple(figures))


def ratio_figure(what: str, ratio: float, least: float | None) -> Figure:
    """Return a figure for a speed as a multiple of another.

    Args:
        what: what was compared with what.
        ratio: the multiple.
        least: smallest multiple that meets the goal; None for no goal.
    """
    if least is None:
        return Figure(what, f"{ratio:.2f}")
    return Figure(what, f"{ratio:.2f}", f"at least {least}", ratio >= least)
