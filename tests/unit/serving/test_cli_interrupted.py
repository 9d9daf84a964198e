"""Ctrl-C before a command has begun."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

LOADING = """
import sys
class Slow:
    def find_spec(self, name, *_):
        if name == "typer":
            print("loading", flush=True)
            sys.stdin.readline()
sys.meta_path.insert(0, Slow())
from kvferry.tools.cli.entry import main
sys.argv = ["kvferry", "--version"]
main()
"""
BEGINNING = """
import typer.main
def interrupted(_):
    raise KeyboardInterrupt
typer.main.get_command = interrupted
from kvferry.tools.cli.entry import main
main()
"""


def test_interrupt_while_the_command_is_loaded_ends_it_silently():
    with loading() as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT
        assert process.stderr.read() == ""


def test_interrupt_that_is_ignored_while_the_command_is_loaded_stays_ignored():
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = loading()
    finally:
        signal.signal(signal.SIGINT, ignored)
    with process:
        process.send_signal(signal.SIGINT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 0


def test_interrupt_while_the_command_begins_ends_it_silently():
    done = subprocess.run([sys.executable, "-c", BEGINNING], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


def loading() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", LOADING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "loading\n"
    return process
