"""What a check has found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How it is: as it should be, worth knowing, or to be changed."""

    OK = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what, in a few words.
        state: how it is.
        found: a sentence without its full stop.
        advice: what to do; what is bad always has some.
    """

    subject: str
    state: State
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        if self.state is State.BAD and not self.advice:
            raise ValueError(f"{self.subject}: {self.found}: what is bad says what to do")


@dataclass(frozen=True, slots=True)
class Section:
    """Findings about one thing, in the order in which they are read."""

    title: str
    findings: tuple[Finding, ...]


def ok(subject: str, found: str) -> Finding:
    """As it should be."""
    return Finding(subject, State.OK, found)


def note(subject: str, found: str, advice: str = "") -> Finding:
    """Worth knowing."""
    return Finding(subject, State.NOTE, found, advice)


def bad(subject: str, found: str, advice: str) -> Finding:
    """To be changed."""
    return Finding(subject, State.BAD, found, advice)


def refused(subject: str, error: Exception, advice: str = "correct it") -> Finding:
    """What kvferry itself refuses: its errors say after the last semicolon what to do.

    >>> refused("port", ValueError("port is 70000; it must be 0 to 65535")).advice
    'it must be 0 to 65535'
    """
    found, semicolon, said = str(error).rpartition("; ")
    return bad(subject, found, said) if semicolon else bad(subject, said, advice)


def is_well(sections: Iterable[Section]) -> bool:
    """Whether there is nothing to fix."""
    return not any(finding.state is State.BAD for section in sections for finding in section.findings)
