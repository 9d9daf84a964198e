"""The result of a check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The state of a finding: OK (nothing is wrong), NOTE (worth knowing) or BAD (must be fixed)."""

    OK = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    Attributes:
        subject: name of the checked thing, in a few words.
        state: whether it must be fixed.
        found: description of the result, without a full stop.
        advice: what the user should do; empty if nothing. A BAD finding always has advice.
    """

    subject: str
    state: State
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        if self.state is State.BAD and not self.advice:
            raise ValueError(f"{self.subject}: {self.found}: what is bad says what to do")


@dataclass(frozen=True, slots=True)
class ReportSection:
    """The findings under one heading of the report, in the order of the output."""

    title: str
    findings: tuple[Finding, ...]


def ok(subject: str, found: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(subject, State.OK, found)


def note(subject: str, found: str, advice: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(subject, State.NOTE, found, advice)


def bad(subject: str, found: str, advice: str) -> Finding:
    """Return a finding that must be fixed."""
    return Finding(subject, State.BAD, found, advice)


def from_error(subject: str, error: Exception, advice: str = "correct it") -> Finding:
    """Return a BAD finding for an error. The advice is the text after the last semicolon of the message.

    >>> from_error("port", ValueError("port is 70000; it must be 0 to 65535")).advice
    'it must be 0 to 65535'

    Args:
        subject: name of the checked thing.
        error: error whose message describes the problem.
        advice: advice if the message has no semicolon.
    """
    # kvferry's errors end with what to do, after a semicolon. What is found before may have semicolons, too.
    found, semicolon, last_part = str(error).rpartition("; ")
    return bad(subject, found, last_part) if semicolon else bad(subject, last_part, advice)


def is_well(sections: Iterable[ReportSection]) -> bool:
    """Return True if no finding in the report is BAD."""
    return not any(finding.state is State.BAD for section in sections for finding in section.findings)
