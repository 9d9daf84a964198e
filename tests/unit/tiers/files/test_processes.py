"""Several processes, one directory, a small capacity; some of them are killed while they write."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest

from kvferry.tiers.files import chunk_file as direct_io, ledger as ledgers
from kvferry.tiers.files.ledger import Ledger, read_ledger
from kvferry.tiers.names import GetOutcome, PutOutcome
from support.chunk_files import verify_file
from support.sharing import work
from support.stores import FILE_BYTES, keep, open_store, temporaries, total
from support.waiting import wait_for

_SPAWN = get_context("spawn")
_CAPACITY = 20 * FILE_BYTES
_KILLS = 20
_LEAST = 21
"""Hits and stores of each process, and looks of the one that watches."""


def watch(path: Path, report: Path) -> None:
    """Add up all files, again and again, while nobody can make, rename or remove one."""
    ledger = Ledger(str(path), 30)
    report.with_suffix(".begun").touch()
    worst, samples, short = 0, 0, 0
    while not report.with_suffix(".stop").exists() or samples < _LEAST:
        with ledger.held() as account:
            found = total(path)
            worst, samples = max(worst, found), samples + 1
            short += account.used < found
        time.sleep(0.001)
    report.write_text(json.dumps({"worst": worst, "samples": samples, "short": short}))


def wait_begun(reports: Path, *names: str) -> None:
    wait_for(lambda: all((reports / f"{name}.begun").exists() for name in names))


def run(path: Path, reports: Path) -> tuple[dict, list[dict]]:
    """Three processes that store and fetch, one that watches; one of the three is killed over and over."""
    watcher = _SPAWN.Process(target=watch, args=(path, reports / "watch"))
    steady = [
        _SPAWN.Process(target=work, args=(path, seed, reports / f"{seed}", True, _LEAST)) for seed in (1, 2)
    ]
    for process in (watcher, *steady):
        process.start()
    wait_begun(reports, "watch", "1", "2")
    draw, context = random.Random(0), get_context("fork")
    for kills in range(_KILLS):
        victim = context.Process(target=work, args=(path, 100 + kills, reports / "victim"))
        victim.start()
        victim.join(draw.uniform(0.05, 0.3))
        victim.kill()
        victim.join()
    for name in ("watch", "1", "2"):
        (reports / f"{name}.stop").touch()
    for process in (watcher, *steady):
        process.join(100)
        assert process.exitcode == 0
    read = [json.loads((reports / name).read_text()) for name in ("watch", "1", "2")]
    return read[0], read[1:]


@pytest.mark.long
def test_processes_that_are_killed_while_they_write_break_nothing(tmp_path):
    path, reports = tmp_path / "cache", tmp_path / "reports"
    path.mkdir()
    reports.mkdir()
    open_store(path, capacity=_CAPACITY)
    watched, worked = run(path, reports)
    assert watched["worst"] <= _CAPACITY
    assert watched["short"] == 0
    for one in worked:
        assert one["wrong"] == 0
        assert GetOutcome.CORRUPT not in one["gets"]
        assert set(one["puts"]) <= {PutOutcome.STORED, PutOutcome.PRESENT}
    assert not list((path / "quarantine").iterdir())
    for chunk in path.rglob("*.kv"):
        with chunk.open("rb") as file:
            verify_file(file.fileno())
    open_store(path)
    assert not temporaries(path)
    assert read_ledger(path) == (_CAPACITY, total(path))
    assert watched["worst"] > _CAPACITY - 3 * FILE_BYTES


@pytest.mark.long
def test_the_disk_itself_never_sees_more_than_the_capacity(tmp_path):
    # A disk of just the capacity, and the blocks of the three small files: what is too much gives ENOSPC.
    size = _CAPACITY + 3 * 4096
    mounted = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", tmp_path]
    if subprocess.run(mounted, check=False).returncode:
        pytest.skip("may not mount a small disk")
    reports = tmp_path.with_name(tmp_path.name + "-reports")
    reports.mkdir()
    try:
        open_store(tmp_path, capacity=_CAPACITY)
        # No fetches: an evicted file takes space for as long as somebody has it open.
        workers = [
            _SPAWN.Process(target=work, args=(tmp_path, n, reports / f"{n}", False, _LEAST))
            for n in (1, 2, 3)
        ]
        for one in workers:
            one.start()
        wait_begun(reports, "1", "2", "3")
        for n in (1, 2, 3):
            (reports / f"{n}.stop").touch()
        most = 0
        while any(one.is_alive() for one in workers):
            space = os.statvfs(tmp_path)
            most = max(most, (space.f_blocks - space.f_bfree) * space.f_frsize)
        assert [one.exitcode for one in workers] == [0] * 3
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert _CAPACITY - 2 * FILE_BYTES < most <= size
    for n in (1, 2, 3):
        puts = json.loads((reports / f"{n}").read_text())["puts"]
        assert set(puts) <= {PutOutcome.STORED, PutOutcome.PRESENT}


@pytest.mark.parametrize("call", range(1, 14))
def test_a_store_killed_at_any_system_call_leaves_nothing_wrong(tmp_path, call):
    store = open_store(tmp_path, capacity=3 * FILE_BYTES)
    for number in (1, 2):
        keep(store, number)
    killed = get_context("fork").Process(target=die_at, args=(tmp_path, call))
    killed.start()
    killed.join()
    assert killed.exitcode in (0, -9)
    assert read_ledger(tmp_path)[1] >= total(tmp_path)
    assert total(tmp_path) <= 3 * FILE_BYTES
    for chunk in tmp_path.rglob("*.kv"):
        with chunk.open("rb") as file:
            verify_file(file.fileno())
    for number in (4, 5, 6):
        assert keep(store, number) is PutOutcome.STORED
        assert total(tmp_path) <= 3 * FILE_BYTES
    open_store(tmp_path)
    assert read_ledger(tmp_path)[1] == total(tmp_path)
    assert not temporaries(tmp_path)


def die_at(path: Path, call: int) -> None:
    """Store a chunk for which another must go, and be killed before the n-th call that changes the disk."""
    store = open_store(path)
    left = [call]

    def counted(real):
        def calling(*args, **kwargs):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), 9)
            return real(*args, **kwargs)

        return calling

    for module, name in (
        (ledgers.os, "pwrite"),
        (ledgers.os, "unlink"),
        (ledgers.os, "rename"),
        (ledgers.os, "utime"),
        (direct_io.os, "pwritev"),
        (ledgers.fcntl, "flock"),
    ):
        setattr(module, name, counted(getattr(module, name)))
    with suppress(OSError):
        keep(store, 3)
    os._exit(0)
