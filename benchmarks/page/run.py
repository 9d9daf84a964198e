"""Run a section's command in a process of its own, and keep what it prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import IO, Any

from benchmarks.page.results import Result, these_versions, this_commit, this_machine

_CHECKOUT = Path(__file__).parents[2]
_PROGRAMS = {
    "benchmarks": [sys.executable, "-m", "benchmarks"],
    "kvferry": [sys.executable, "-c", "from kvferry.tools.cli.main import main; main()"],
}
_END_SECONDS = 60.0
_KEPT_BYTES = 16 << 10
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run(command: tuple[str, ...]) -> Result:
    """Run a command with ``--json``. Its progress and messages go to standard error.

    Args:
        command: name of a program, ``benchmarks`` or ``kvferry``, and its arguments without ``--json``.

    Returns:
        The result, which holds the error if the command failed.

    Raises:
        KeyboardInterrupt: the user stopped the command. It has ended.
    """
    program, *arguments = command
    began = time.monotonic()
    with tempfile.TemporaryFile() as out:
        code, said = _finish([*_PROGRAMS[program], *arguments, "--json"], out)
        out.seek(0)
        document, error = _document(out.read()) if code == 0 else (None, None)
    if code != 0:
        error = last_error(said) or f"exit status {code}"
    return Result(
        command=command,
        seconds=time.monotonic() - began,
        date=datetime.now(UTC).date().isoformat(),
        machine=this_machine(),
        versions=these_versions(),
        commit=this_commit(_CHECKOUT),
        document=document,
        error=error,
    )


def last_error(said: str) -> str:
    r"""Return the last error of kvferry in what a command wrote to standard error, or else the last line.

    >>> last_error("kvferry: no room\nsome/python/module.py:254: UserWarning: leaked\n")
    'no room'
    """
    lines = [line.strip() for line in re.split(r"[\r\n]+", _ESCAPES.sub("", said)) if line.strip()]
    ours = [line.removeprefix("kvferry: ") for line in lines if line.startswith("kvferry: ")]
    return (ours or lines or [""])[-1]


def _document(printed: bytes) -> tuple[Any, str | None]:
    try:
        return json.loads(printed), None
    except ValueError as error:
        return None, f"the command printed no JSON: {error}"


def _finish(arguments: list[str], out: IO[bytes]) -> tuple[int, str]:
    """Run a program to its end. Return its exit status, and the end of its standard error."""
    environment = dict(os.environ)
    if sys.stderr.isatty():
        # The pipe is no terminal: without these, the command would show no progress line.
        environment.update(FORCE_COLOR="1", COLUMNS=str(os.get_terminal_size(sys.stderr.fileno()).columns))
    with subprocess.Popen(
        arguments, stdout=out, stderr=subprocess.PIPE, cwd=_CHECKOUT, env=environment
    ) as process:
        kept: deque[bytes] = deque()
        reader = Thread(target=_pass_on, args=(process.stderr, kept), daemon=True)
        reader.start()
        try:
            process.wait()
        except KeyboardInterrupt:
            # Ctrl-C has reached the command too, which now ends its engines.
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
        # A process that the command left behind may keep the pipe open.
        reader.join(_END_SECONDS)
    return process.returncode, b"".join(kept)[-_KEPT_BYTES:].decode(errors="replace")


def _pass_on(pipe: IO[bytes], kept: deque[bytes]) -> None:
    """Write what comes through a pipe to standard error, and keep its end."""
    while piece := os.read(pipe.fileno(), 4096):
        sys.stderr.write(piece.decode(errors="replace"))
        sys.stderr.flush()
        kept.append(piece)
        if len(kept) > _KEPT_BYTES:
            kept.popleft()
