"""The benchmark moves real bytes between two processes, and both end whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from kvferry.bench.shapes import Shape, block_table

from kvferry.bench import report
from kvferry.bench.movers import Ferry
from kvferry.bench.reader import Reader
from kvferry.bench.transfer import Job, measure
from kvferry.errors import TransferError

pytestmark = pytest.mark.transport

TINY = Shape("tiny", layers=2, kv_heads=2, head_dim=32)
TOKENS = 640
BLOCKS = 40


def _quiet(_: str) -> None:
    """Progress is not looked at."""


@pytest.fixture
def reader():
    with Reader(TINY, BLOCKS + 1, {}) as reader:
        yield reader


def test_everything_is_measured_once_through() -> None:
    measured = measure(Job(TINY, TOKENS, "scattered", 7, planned_tokens=4096), _quiet)
    loaded = json.loads(json.dumps(report.as_json(measured)))
    assert loaded["comparison"]["ferry"]["bytes"] == BLOCKS * TINY.block_bytes
    assert [series["bytes"] for series in loaded["comparison"]["others"]] == [BLOCKS * TINY.block_bytes] * 3
    assert all(len(series["seconds"]) == 7 for series in loaded["comparison"]["others"])
    assert measured.hooks.loads > measured.hooks.in_flight
    assert 0 < measured.hooks.median <= measured.hooks.p99 <= measured.hooks.longest
    assert measured.planning.blocks == 256


def test_a_move_is_checked_page_by_page(reader: Reader) -> None:
    src, dst = block_table(BLOCKS, "scattered", 1), block_table(BLOCKS, "scattered", 2)
    Ferry(reader, TOKENS, src, dst).move()
    reader.pool.check(src, dst)
    with pytest.raises(TransferError, match="80 of 80 pages"):
        reader.pool.check(np.roll(src, 1), dst)


def test_every_lease_is_acknowledged(reader: Reader) -> None:
    src, dst = block_table(BLOCKS, "scattered", 1), block_table(BLOCKS, "scattered", 2)
    ferry = Ferry(reader, TOKENS, src, dst)
    tickets = []
    for _ in range(2):
        ferry.move()
        wanted = reader.wanted(TOKENS, src, dst)
        tickets.append(wanted.ticket)
        reader.acknowledge(wanted.key)
        reader.producer.wait_ended()
    # One slot serves all: it is free again each time, one generation on.
    assert {ticket.slot for ticket in tickets} == {tickets[0].slot}
    assert tickets[1].generation == tickets[0].generation + 2


def test_a_producer_that_dies_is_one_sentence(reader: Reader) -> None:
    os.kill(reader.producer.pid, signal.SIGKILL)
    src = block_table(BLOCKS, "scattered", 1)
    with pytest.raises(TransferError, match=r"the producer process \(pid \d+\) died: killed by signal 9"):
        Ferry(reader, TOKENS, src, src).move()


_RUN = """
import typer
from kvferry.cli.bench import register
if __name__ == "__main__":
    app = typer.Typer()
    register(app)
    app()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_both_processes_end_together(number: int, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(_RUN)
    command = [sys.executable, str(script), "bench", "transfer", "--layers", "2", "--repeats", "100000"]
    running = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _until(lambda: len(_in_session(running.pid)) >= 2, 60)
        time.sleep(2)
        if number == signal.SIGINT:
            os.killpg(running.pid, number)
        else:
            os.kill(running.pid, number)
        assert running.wait(30) != 0
        _until(lambda: not _in_session(running.pid), 30)
    finally:
        for pid in _in_session(running.pid):
            os.kill(pid, signal.SIGKILL)


def _in_session(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if after_name[0] != "Z" and int(after_name[3]) == session:
            found.append(int(stat.parent.name))
    return found


def _until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds:g} s"
        time.sleep(0.05)
