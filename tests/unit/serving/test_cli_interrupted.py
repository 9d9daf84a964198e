"""Ctrl-C before a command has begun."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

LOADING = """
import sys, time
class Slow:
    def find_spec(self, name, *_):
        if name == "typer":
            print("loading", flush=True)
            time.sleep({seconds})
sys.meta_path.insert(0, Slow())
from kvferry.cli.entry import main
sys.argv = ["kvferry", "--version"]
main()
"""
BEGINNING = """
import typer.main
def interrupted(_):
    raise KeyboardInterrupt
typer.main.get_command = interrupted
from kvferry.cli.entry import main
main()
"""


def test_while_it_is_loaded_it_ends_without_a_word():
    with loading(60) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT
        assert process.stderr.read() == ""


def test_where_it_is_ignored_it_stays_so():
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = loading(1)
    finally:
        signal.signal(signal.SIGINT, ignored)
    with process:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_while_it_begins_it_ends_without_a_word():
    done = subprocess.run([sys.executable, "-c", BEGINNING], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


def loading(seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", LOADING.format(seconds=seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "loading\n"
    return process
