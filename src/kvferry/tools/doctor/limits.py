"""Run checks with deadlines.

A check that only waits for sockets runs in a thread, which is abandoned at its deadline. A check that may
crash, or hang in the kernel (a dead mount, a driver), runs in a process. At the deadline the process and its
children are killed.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvferry.tools.doctor.finding import Finding, bad
from kvferry.errors import KVFerryError

_KILLED_SECONDS = 2.0
_MAX_ERROR_CHARACTERS = 300

T = TypeVar("T")


class CheckTimeout(KVFerryError):
    """Raised if a check does not end by its deadline."""


def run_within(seconds: float, call: Callable[[], T]) -> T:
    """Run a function in a thread, and return its result.

    Raises:
        CheckTimeout: the function did not end in time.
        Exception: any exception that the function raised.
    """
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
    """The result of a process.

    Attributes:
        code: exit code, or -n if signal n ended the process; None if it was killed at its deadline.
        out: standard output.
        err: standard error.
    """

    code: int | None
    out: str
    err: str

    @property
    def how(self) -> str:
        """How the process ended."""
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
    """Run another Python interpreter, and kill it and its children at the deadline.

    Args:
        arguments: arguments of the interpreter, such as ``["-m", module]``.
        seconds: time limit.
        environment: variables to add to those of this process; None for none.
    """
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
