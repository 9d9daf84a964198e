"""Commands whose output cannot be written end with one sentence, or silently where nobody reads it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

KVFERRY = [sys.executable, "-c", "from kvferry.cli.main import main; main()"]
COMMANDS = [
    ["--version"],
    ["--help"],
    ["plan", "Qwen3-8B"],
    ["doctor", "--no-machine", "kvferry://127.0.0.1:1"],
    ["top", "--once", "--json", "--interval", "0.1", "http://127.0.0.1:1"],
]


LONG = [  # of which none would end in the time that `ends` gives, or without a word
    ["serve", ".", "--port", "0"],
    ["doctor"],
    ["demo", "/nowhere"],
    ["bench", "transfer"],
    ["bench", "calibrate"],
]


def ends(arguments: list[str], stdout: int, unbuffered: str, seconds: float = 60) -> tuple[int, str]:
    done = subprocess.run(
        [*KVFERRY, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    return done.returncode, done.stderr


@pytest.fixture(params=["", "1"], ids=["buffered", "unbuffered"])
def unbuffered(request):
    return request.param


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_no_room_for_the_output_is_one_sentence(arguments, unbuffered):
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        code, said = ends(arguments, full, unbuffered)
    finally:
        os.close(full)
    assert said == (
        "kvferry: cannot write to standard output: No space left on device; check where it is redirected to\n"
    )
    assert code == 1


@pytest.mark.parametrize("arguments", LONG, ids=" ".join)
def test_what_takes_long_does_not_begin_where_its_output_cannot_be_written(arguments):
    full = os.open("/dev/full", os.O_WRONLY)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        code, said = ends(arguments, full, "", 15)
        assert (code, said.count("\n")) == (1, 1)
        assert said.startswith("kvferry: cannot write to standard output: No space left on device;")
        assert ends(arguments, writing, "", 15) == (1, "")
    finally:
        os.close(full)
        os.close(writing)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_reader_that_has_gone_is_no_complaint(arguments, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert ends(arguments, writing, unbuffered) == (1, "")
    finally:
        os.close(writing)


def test_what_is_wrong_is_said_where_nothing_can_be_printed():
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        code, said = ends(["plan", "/nowhere"], full, "")
    finally:
        os.close(full)
    assert code == 2
    assert said.startswith("kvferry: ")
    assert said.count("\n") == 1
