"""The results of checks, the report that has them, and time limits for checks."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from kvferry.common.errors import KVFerryError
from kvferry.common.units import counted
from kvferry.tools.report import wrapped


class State(StrEnum):
    """The state of a finding: OK (nothing is wrong), NOTE (worth knowing) or BAD (must be fixed)."""

    OK = "ok"
    NOTE = "note"
    BAD = "bad"


_MARKS = {State.OK: "ok", State.NOTE: "note", State.BAD: "BAD"}
_STYLES = {State.OK: "green", State.NOTE: "yellow", State.BAD: "bold red"}
_INDENT = 7
_ARROW = "-> "
_KILLED_SECONDS = 2.0
_MAX_ERROR_CHARACTERS = 300

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    Attributes:
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
    """
    # kvferry's errors end with what to do, after a semicolon. What is found before may have semicolons, too.
    found, semicolon, last_part = str(error).rpartition("; ")
    return bad(subject, found, last_part) if semicolon else bad(subject, last_part, advice)


def is_well(sections: Iterable[ReportSection]) -> bool:
    """Return True if no finding in the report is BAD."""
    return not any(finding.state is State.BAD for section in sections for finding in section.findings)


def print_report(sections: Sequence[ReportSection], console: Console) -> None:
    """Print all sections of the report and a summary line to `console`."""
    # Wrapped here and not by rich, which would separate numbers from their units.
    lines: list[Text] = []
    for section in sections:
        lines += [Text(line, "bold") for line in wrapped(section.title)]
        for finding in section.findings:
            first, *rest = wrapped(f"{finding.subject}: {finding.found}", _INDENT)
            mark = Text(f"  {_MARKS[finding.state]:<{_INDENT - 2}}", _STYLES[finding.state])
            lines += [mark + Text(first.strip()), *map(Text, rest)]
            if finding.advice:
                lines += map(Text, wrapped(_ARROW + finding.advice, _INDENT, len(_ARROW)))
        lines.append(Text())
    for line in (*lines, *map(Text, wrapped(summary(sections)))):
        console.print(line, soft_wrap=True)


def summary(sections: Sequence[ReportSection]) -> str:
    """Return the summary line of the report, with the number of findings to fix."""
    counts = Counter(finding.state for section in sections for finding in section.findings)
    noted = f"; {counts[State.NOTE]} worth a look" if counts[State.NOTE] else ""
    if not counts[State.BAD]:
        return f"Nothing to fix{noted}."
    return f"{counts[State.BAD]} of {counted(counts.total(), 'check')} found something to fix{noted}."


def as_json(sections: Sequence[ReportSection]) -> dict[str, Any]:
    """Return the report as JSON types: ``well`` is True if nothing must be fixed."""
    return {"well": is_well(sections), "sections": [asdict(section) for section in sections]}


class CheckTimeout(KVFerryError):
    """Raised if a check does not end by its deadline."""


def run_within(seconds: float, call: Callable[[], T]) -> T:
    """Run a function in a thread, and return or raise what it does. Raise CheckTimeout at the deadline."""
    (answer,) = run_all_within(seconds, [call])
    if isinstance(answer, BaseException):
        raise answer
    return answer


def run_all_within(seconds: float, calls: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """Run functions concurrently in threads, and return their results in the order of `calls`.

    If a function raises, its result is the exception. If it does not end in time, its result is a
    CheckTimeout, and the function continues in its thread.
    """
    answers: queue.SimpleQueue[tuple[int, T | BaseException]] = queue.SimpleQueue()

    def run(number: int, call: Callable[[], T]) -> None:
        try:
            answers.put((number, call()))
        except BaseException as error:  # noqa: BLE001 - returned to the caller
            answers.put((number, error))

    # Not a ThreadPoolExecutor: the interpreter would wait for its threads at exit, also for one that hangs.
    for number, call in enumerate(calls):
        threading.Thread(target=run, args=(number, call), name="kvferry-doctor", daemon=True).start()
    late = CheckTimeout(f"no result in {seconds:g} s")
    found: dict[int, T | BaseException] = {}
    until = time.monotonic() + seconds
    while len(found) < len(calls):
        try:
            number, answer = answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            break
        found[number] = answer
    return [found.get(number, late) for number in range(len(calls))]


def run_check(subject: str, seconds: float, check: Callable[[], Iterable[T]]) -> list[T | Finding]:
    """Run a check in a thread, and return its results. A timeout or an exception becomes a finding."""
    try:
        return run_within(seconds, lambda: [*check()])
    except CheckTimeout as error:
        return [bad(subject, f"no answer: {error}", "check whether a device, mount or driver hangs")]
    except Exception as error:  # noqa: BLE001 - a broken check must not hide the findings of others
        why = f"{type(error).__name__}: {error}"
        return [bad(subject, f"this check failed unexpectedly: {why}", "please report it")]


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """The result of a process. `code` is -n if signal n ended it, None if it was killed at its deadline."""

    code: int | None
    out: str
    err: str

    @property
    def how(self) -> str:
        if self.code is None:
            return "it did not finish in time"
        return f"signal {-self.code} ended it" if self.code < 0 else f"it ended with exit code {self.code}"

    @property
    def last_words(self) -> str:
        """The last line of standard error, cut to 300 characters, or else `how`."""
        # Libraries may have written much before a process hangs, which is not why it was killed.
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        return lines[-1][:_MAX_ERROR_CHARACTERS] if lines and self.code is not None else self.how


def run_python(
    arguments: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> ProcessResult:
    """Run another Python interpreter, and kill it and its children at the deadline."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
        start_new_session=True,  # so that its children can be killed with it
    )
    code: int | None
    try:
        out, err = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        out, err = _kill(process)
        code = None
    except BaseException:
        _kill(process)
        raise
    return ProcessResult(code, out, err)


def _kill(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill a process and its process group, and return (standard output, standard error)."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that hangs in the kernel does not end when it is killed, so it is left behind.
    try:
        return process.communicate(timeout=_KILLED_SECONDS)
    except subprocess.TimeoutExpired as left:
        return _text(left.stdout), _text(left.stderr)


def _text(out: bytes | str | None) -> str:
    return out if isinstance(out, str) else (out or b"").decode(errors="replace")
