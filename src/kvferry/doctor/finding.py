"""Result of a check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """State of a finding: fine, worth knowing, or to be fixed."""

    OK = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of a check.

    Attributes:
        subject: what was checked, in a few words.
        state: the result.
        found: what was found, a sentence without its full stop.
        advice: what to do; never empty for BAD.
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
    """Findings under one heading, in reading order."""

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
    """Return a finding for a kvferry error; its text after the last semicolon becomes the advice.

    >>> from_error("port", ValueError("port is 70000; it must be 0 to 65535")).advice
    'it must be 0 to 65535'
    """
    found, semicolon, said = str(error).rpartition("; ")
    return bad(subject, found, said) if semicolon else bad(subject, said, advice)


def is_well(sections: Iterable[ReportSection]) -> bool:
    """Return whether there is nothing to fix."""
    return not any(finding.state is State.BAD for section in sections for finding in section.findings)
