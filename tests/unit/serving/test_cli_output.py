"""Commands whose output cannot be written end with one sentence, or silently if its reader has gone."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from collections.abc import Iterator

import pytest

from support.command_line import KVFERRY, run_kvferry

COMMANDS = [
    ["--version"],
    ["--help"],
    ["plan", "Qwen3-8B"],
    ["doctor", "--no-machine", "kvferry://127.0.0.1:1"],
    ["top", "--once", "--json", "--interval", "0.1", "http://127.0.0.1:1"],
]
LONG = [
    ["serve", ".", "--port", "0"],
    ["doctor"],
    ["demo", "/nowhere"],
    ["bench", "transfer"],
]
NO_ROOM = (
    "kvferry: cannot write to standard output: No space left on device; check where it is redirected to\n"
)


class Output(io.TextIOWrapper):
    """Standard output that remembers what was printed."""

    printed = ""

    def write(self, text: str) -> int:
        self.printed += text
        return super().write(text)


@contextlib.contextmanager
def full_disk() -> Iterator[int]:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def closed_pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)


def run_into(descriptor: int, arguments: list[str], *, buffered: bool = True) -> tuple[int, str, str]:
    """Run a command, and return its exit code, its errors and what it printed."""
    own = os.dup(descriptor)  # kvferry replaces what it cannot write to
    file = os.fdopen(own, "wb", -1 if buffered else 0)
    # Click leaves output behind that nobody reads; a real process proves that the interpreter drops it.
    with contextlib.suppress(BrokenPipeError), Output(file, write_through=not buffered) as output:
        done = run_kvferry(*arguments, stdout=output)
    return done.returncode, done.stderr, output.printed


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_full_disk_is_one_sentence(arguments, buffered):
    with full_disk() as output:
        code, errors, _ = run_into(output, arguments, buffered=buffered)
    assert (code, errors) == (1, NO_ROOM)


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_closed_pipe_is_no_error(arguments, buffered):
    with closed_pipe() as output:
        code, errors, _ = run_into(output, arguments, buffered=buffered)
    assert (code, errors) == (1, "")


@pytest.mark.parametrize("arguments", LONG, ids=" ".join)
def test_long_command_does_not_begin_if_its_output_cannot_be_written(arguments):
    with full_disk() as output:
        assert run_into(output, arguments) == (1, NO_ROOM, "")
    with closed_pipe() as output:
        assert run_into(output, arguments) == (1, "", "")


def test_error_is_printed_if_output_cannot_be_written():
    with full_disk() as output:
        code, errors, _ = run_into(output, ["plan", "/nowhere"])
    assert code == 2
    assert errors.startswith("kvferry: ")
    assert errors.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "option", "errors"),
    [(full_disk, "--version", NO_ROOM), (closed_pipe, "--version", ""), (closed_pipe, "--help", "")],
    ids=["full_disk", "closed_pipe", "closed_pipe_of_help"],
)
def test_interpreter_adds_no_complaint_at_exit(output, option, errors):
    with output() as stdout:
        done = subprocess.run(
            [*KVFERRY, option],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # text that cannot be written stays in the buffer
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, errors)
