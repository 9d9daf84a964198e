"""Find the line of an engine's log that tells why the engine ended."""

from __future__ import annotations

import re
from pathlib import Path

# A log may have gigabytes, and the cause of an end stands near its end.
_TAIL_BYTES = 256 << 10
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Prefix of a log line: "(EngineCore pid=7) ERROR 09-30 12:00:00 [core.py:7] ". Each part is optional.
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_EXCEPTION = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Incompatible|Exit)): *(.*)$")
_FATAL = re.compile(r"^Fatal Python error: (.*)$")  # of faulthandler, which names the signal
# How vLLM reports that one of its processes has ended.
_PROCESS_CODE = re.compile(r"(?:Failed core proc\(s\): \{.*?: |\(exit code: |died with exit code )(-?\d+)")
_USAGE_ERROR = re.compile(r"^\S+: error: (.*)$")
# Messages of a process about the failure of another process. The log has the cause further above.
_ECHOES = (
    "See root cause above",
    "initialization failed",
    "Failed core proc",
    "EngineDeadError",
    "cancelled",
)
_MAX_CHARS = 500


def error_line(log_path: Path) -> str | None:
    """Return the text of the last error in an engine's log; None if the log has no error."""
    lines = [_PREFIX.sub("", _ANSI.sub("", line)).rstrip() for line in _tail(log_path)]
    echo = None
    for index in range(len(lines) - 1, -1, -1):
        error = _error_at(lines, index)
        if error and not any(mark in error for mark in _ECHOES):
            return error[:_MAX_CHARS]
        echo = echo or error
    return echo[:_MAX_CHARS] if echo else None


def process_code(log_path: Path) -> int | None:
    """Return the exit code of the vLLM process that failed first, as another one reports it, if any does."""
    codes = (found for line in _tail(log_path) for found in _PROCESS_CODE.findall(line))
    return next((int(code) for code in codes if code != "0"), None)


def last_line(log_path: Path) -> str:
    """Return the last line of an engine's log that has text, without its prefix; empty if there is none."""
    return next(iter(last_lines(log_path, 1)), "")


def last_lines(log_path: Path, count: int) -> list[str]:
    """Return the last lines of an engine's log that have text, without their prefixes, the oldest first."""
    lines = (_PREFIX.sub("", _ANSI.sub("", line)).strip() for line in _tail(log_path))
    return [line for line in lines if line][-count:]


def _error_at(lines: list[str], index: int) -> str | None:
    if usage := _USAGE_ERROR.match(lines[index]):
        return usage[1]
    if fatal := _FATAL.match(lines[index]):
        return fatal[1]
    if not (match := _EXCEPTION.match(lines[index])):
        return None
    name, text = match[1], match[2]
    # pydantic prints the number of errors on this line, and the first error one or two lines below.
    if "validation error" in text:
        below = [line.strip() for line in lines[index + 1 : index + 3]]
        text = next((line for line in below if line.startswith(("Value error", "Assertion"))), text)
        text = text.split(" [type=")[0]
    return f"{name}: {text}" if text else None


def _tail(log_path: Path) -> list[str]:
    try:
        with log_path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()
    except OSError:
        return []
