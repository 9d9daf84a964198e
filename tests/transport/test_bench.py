"""The benchmark moves real bytes between two processes, and both end whatever happens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from benchmarks.layout import measure as layout, report as layout_report
from benchmarks.layout.cells import METHODS
from benchmarks.overhead.measure import OverheadJob, measure as measure_overhead
from benchmarks.safety import measure as safety, report as safety_report
from benchmarks.safety.cost import SafetyJob
from kvferry.common.errors import TransferError
from kvferry.planning.strategy import Strategy
from kvferry.tools.bench import transfer as transfer_report
from kvferry.tools.bench.movers import KVFerryMover
from kvferry.tools.bench.transfer import TransferJob, measure
from kvferry.tools.cli.main import app
from kvferry.tools.doctor.reads import calibrate
from kvferry.tools.measuring.calibrate import CalibrationJob, calibrate as measure_costs
from kvferry.tools.measuring.producer_process import ProducerProcess
from kvferry.tools.measuring.reader import Reader
from kvferry.tools.measuring.rounds import machine_facts
from kvferry.tools.measuring.simulated import SimulatedEngine, read_geometry, simulate_engine
from kvferry.tools.plan.side import EngineSide
from kvferry.transport.costs import default_costs_path, read_costs
from support.waiting import wait_for

pytestmark = pytest.mark.transport

TINY = read_geometry("Llama-3.1-8B", {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32})
TOKENS = 640
BLOCKS = 40
BLOCK_BYTES = 2 * 16 * 2 * 2 * 32 * 2


def _quiet(_: str) -> None:
    """Progress is not looked at."""


def _engine(name: str, seed: int, **side: int | str) -> SimulatedEngine:
    return simulate_engine(name, TINY, EngineSide(**side), TOKENS, seed=seed)


SOURCE = _engine("source", 1)


@contextmanager
def _pair() -> Iterator[Reader]:
    with ProducerProcess([SOURCE], {}) as producer, Reader(_engine("destination", 2), producer) as reader:
        yield reader


@pytest.fixture(scope="module")
def reader():
    with _pair() as reader:
        yield reader


def test_everything_is_measured_once_through() -> None:
    measured = measure(
        TransferJob(reading=TINY, side=EngineSide(), tokens=TOKENS, order="scattered", repeats=7),
        _quiet,
    )
    loaded = json.loads(json.dumps(transfer_report.as_json(measured)))
    assert loaded["comparison"]["ferry"]["bytes"] == BLOCKS * BLOCK_BYTES
    assert [series["bytes"] for series in loaded["comparison"]["others"]][1:] == [BLOCKS * BLOCK_BYTES] * 2
    assert all(len(series["seconds"]) == 7 for series in loaded["comparison"]["others"])


@pytest.mark.long
def test_hooks_and_planning_are_measured_while_requests_move() -> None:
    job = OverheadJob(reading=TINY, planned_tokens=4096, moved_tokens=TOKENS, repeats=7)
    measured = measure_overhead(job, _quiet)
    assert measured.hooks.loads > measured.hooks.in_flight
    assert 0 < measured.hooks.median <= measured.hooks.p99 <= measured.hooks.longest
    assert measured.planning.pages == 512


def test_a_move_is_checked_byte_for_byte(reader: Reader) -> None:
    KVFerryMover("", reader, SOURCE).move()
    reader.check()
    reader.cache.buffer[-1] ^= 1
    with pytest.raises(TransferError, match="1 of"):
        reader.check()


def test_blocks_read_in_the_wrong_order_are_noticed(reader: Reader) -> None:
    other = _engine("source", 3)
    with pytest.raises(TransferError, match="are not what they must be"):
        KVFerryMover("", reader, other).move()


def test_every_lease_is_acknowledged(reader: Reader) -> None:
    ferry = KVFerryMover("", reader, SOURCE)
    leases = []
    for _ in range(2):
        ferry.move()
        wanted = reader.load_request(SOURCE.span, SOURCE.tables, reader.engine.tables)
        leases.append(wanted.lease)
        reader.acknowledge(wanted.key)
        reader.producer.wait_ended()
    # One slot serves all: it is free again each time, one generation on.
    assert {lease.slot for lease in leases} == {leases[0].slot}
    assert leases[1].generation == leases[0].generation + 2


def test_a_producer_that_dies_is_one_sentence() -> None:
    with _pair() as reader:
        os.kill(reader.producer.pid, signal.SIGKILL)
        with pytest.raises(TransferError, match=r"the producer process \(pid \d+\) died: killed by signal 9"):
            KVFerryMover("", reader, SOURCE).move()


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "fewer"),
    [
        ("gpt-oss-20b", {}),
        ("Qwen3-Next-80B-A3B", {"linear_num_value_heads": 4, "linear_num_key_heads": 2}),
    ],
)
def test_layouts_are_compared_in_every_way(model: str, fewer: dict[str, int]) -> None:
    changes = {"num_hidden_layers": 8, **fewer}
    job = layout.LayoutJob(
        layouts=("LBNHC", "BHLNC"), parallel=((2, 1), (1, 2)), repeats=7, tokens=320, planned_tokens=2048
    )
    table = layout.measure(job, read_geometry(model, changes), _quiet)
    left_out = [cell for cell, _ in table.left_out]
    hybrid = model.startswith("Qwen")
    assert left_out == (["BHLNC TP 2→1", "BHLNC TP 1→2"] if hybrid else [])
    assert [str(row.cell) for row in table.rows][:2] == ["LBNHC TP 2→1", "LBNHC TP 1→2"]
    for row in table.rows:
        assert [len(row.ratios[way]) for way in METHODS] == [7] * 4
        assert row.strategy
    assert len(table.raw) == 7
    json.dumps(layout_report.as_json([table], machine_facts()))


def test_a_pinned_strategy_is_what_moves(reader: Reader) -> None:
    for strategy in Strategy:
        ferry = KVFerryMover("", reader, SOURCE, strategy=strategy)
        ferry.move()
        assert ferry.strategies == (strategy,)


@pytest.mark.long
def test_encryption_is_measured_beside_the_same_talk_without() -> None:
    job = SafetyJob(
        parts=("curve",),
        reading=read_geometry("Llama-3.1-8B", {"num_hidden_layers": 2}),
        tokens=512,
        repeats=7,
    )
    measured = safety.measure(job, _quiet)
    trip, connecting, direct, staged = measured.costs
    assert (trip.target, connecting.target, direct.target, staged.target) == (None, None, 0.02, 0.02)
    assert direct.work == "2 messages of a direct transfer"
    asked = re.fullmatch(r"(\d+) messages of a staged transfer", staged.work)
    assert asked, staged.work
    assert int(asked[1]) >= 4, "redeem, release, and at least one chunk that is asked for and done"
    for cost in measured.costs:
        assert len(cost.on) == len(cost.off) == 7
        assert min(cost.on + cost.off) > 0
    assert all(len(cost.whole) == 7 for cost in (direct, staged))
    assert connecting.extra.median > 0, "a handshake costs something"
    json.dumps(safety_report.as_json(measured))


@pytest.mark.long
def test_transfers_are_measured_with_and_without_verification(monkeypatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    job = SafetyJob(parts=("verify",), reading=TINY, tokens=512, repeats=7)
    costs = safety.measure(job, _quiet).costs
    times, processor_times = costs[::2], costs[1::2]
    assert [cost.work.split(", ", 1)[1] for cost in times] == [
        "alike", "from TP2, other blocks and layout", "alike, over TCP",
    ]  # fmt: skip
    for cost in costs:
        assert len(cost.on) == len(cost.off) == 7
        assert min(cost.on + cost.off) > 0
    assert all(cost.target == 0.03 for cost in times)
    assert all(cost.extra.median > 0 for cost in processor_times), "digests cost something"
    assert "UCX_TLS" not in os.environ


@pytest.mark.long
def test_the_doctor_writes_the_costs_that_it_measures(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    app(["doctor", "--calibrate", "--no-machine", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["well"]
    costs = read_costs(default_costs_path())
    assert min(costs.read_byte_seconds, costs.copy_byte_seconds, costs.ask_seconds) > 0


def test_costs_are_written_where_they_are_wanted(tmp_path: Path) -> None:
    small = CalibrationJob(
        repeats=7,
        read_sizes=(1 << 12, 1 << 16),
        read_bytes=1 << 20,
        read_descriptors=64,
        runs=(1024,),
        cells=(1 << 14,),
        copy_bytes=1 << 18,
    )
    file = tmp_path / "costs.json"
    *measured, prediction, written = calibrate(str(file), _quiet, partial(measure_costs, small))
    assert prediction.found.startswith("2 kinds of reads within ")
    assert written.found.startswith(f"written to {file}")
    assert len(measured) == len(asdict(read_costs(file)))


_RUN = """
from kvferry.tools.cli.main import app
if __name__ == "__main__":
    app()
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_both_processes_end_together(number: int, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(_RUN)
    command = [sys.executable, str(script), "bench", "transfer", "--layers", "2", "--repeats", "100000"]
    running = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: len(_in_session(running.pid)) >= 2)
        time.sleep(2)  # NIXL starts meanwhile, most of the time
        if number == signal.SIGINT:
            os.killpg(running.pid, number)
        else:
            os.kill(running.pid, number)
        assert running.wait(60) != 0
        wait_for(lambda: not _in_session(running.pid))
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
