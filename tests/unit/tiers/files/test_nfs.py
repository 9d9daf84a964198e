"""Machines that store and fetch at once in a directory that they have mounted over NFS."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvferry.tiers.files.ledger import read_ledger
from kvferry.tiers.names import GetOutcome, PutOutcome
from support.chunk_files import verify_file
from support.namespaces import NotPermitted
from support.nfs.machines import LEASE_SECONDS, Machine, Network, ServerEnded, shared_over_nfs
from support.stores import FILE_BYTES, open_store, total
from support.waiting import wait_for

CAPACITY = 20 * FILE_BYTES
SECONDS = 8.0
_F_OFD_SETLK = 37
_LOCK = struct.Struct("hhqqi4x")  # struct flock

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("linux.uml") is None, reason="`make .venv/.nfs` installs what it needs"),
]


@contextmanager
def locked(ledger: Path) -> Iterator[None]:
    """Hold the ledger's lock on the server, as its NFS server does for machines: not with flock."""
    with ledger.open("r+b") as file:
        while True:
            try:
                fcntl.fcntl(file, _F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                time.sleep(0.0005)
        yield


@dataclass
class Watched:
    """What was seen while no machine held the lock.

    An NFS client renames a file that is removed while it is open, to ``.nfs...``, and removes it when it is
    closed. Such files are not counted: on a disk, too, a removed file takes space until it is closed.

    Attributes:
        worst: most bytes of all files.
        short: times at which the ledger had fewer bytes than the files.
        samples: number of looks.
        names: of all files that were seen.
    """

    worst: int = 0
    short: int = 0
    samples: int = 0
    names: set[str] = field(default_factory=set)

    def look(self, path: Path) -> None:
        with locked(path / "ledger"):
            removed = sum(gone.stat().st_size for gone in path.rglob(".nfs*"))
            found, (_, used) = total(path) - removed, read_ledger(str(path))
        self.worst, self.samples = max(self.worst, found), self.samples + 1
        self.short += used < found
        self.names |= {chunk.name for chunk in path.rglob("*.kv")}


def begin(network: Network, reports: Path, names: str) -> dict[str, Machine]:
    """Start machines that store and fetch; they have mounted the directory when this returns."""
    machines = {
        name: network.start(name, "support.sharing:work", str(seed), str(reports / name))
        for seed, name in enumerate(names)
    }
    for name, machine in machines.items():

        def begun(begins: Path = reports / f"{name}.begun", machine: Machine = machine) -> bool:
            network.check()
            assert machine.on, machine.log.read_text()
            return begins.exists()

        wait_for(begun, 120)
        assert ":/shared /run/shared nfs4 rw" in machine.log.read_text()
    return machines


def test_machines_that_share_a_directory_over_nfs_keep_its_capacity_and_use_only_sound_chunks(
    tmp_path: Path,
) -> None:
    for attempt in range(4):
        path, reports, folder = (tmp_path / f"{name}-{attempt}" for name in ("cache", "reports", "machines"))
        for each in (path, reports, folder):
            each.mkdir()
        open_store(path, capacity=CAPACITY)
        try:
            with shared_over_nfs(path, folder) as network:
                watched = share(network, path, reports)
            break
        except NotPermitted as error:
            pytest.skip(str(error))
        except ServerEnded:
            if attempt == 3:
                raise
    assert watched.samples > 20
    assert CAPACITY - 3 * FILE_BYTES < watched.worst <= CAPACITY
    assert watched.short == 0
    for name in "ab":
        told = json.loads((reports / name).read_text())
        assert told["wrong"] == 0
        assert GetOutcome.CORRUPT not in told["gets"]
        assert set(told["puts"]) <= {PutOutcome.STORED, PutOutcome.PRESENT}
        assert told["foreign"] > 0, "it fetched nothing that another machine had stored"
        assert told["listed"] > 0, "its index had nothing of another machine"
        assert told["puts"][PutOutcome.STORED] > 0
    assert not list((path / "quarantine").iterdir())
    for gone in path.rglob(".nfs*"):
        gone.unlink()  # of the machine that died
    for chunk in path.rglob("*.kv"):
        with chunk.open("rb") as file:
            verify_file(file.fileno())
    open_store(path)
    assert read_ledger(str(path)) == (CAPACITY, total(path))


def share(network: Network, path: Path, reports: Path) -> Watched:
    """Let three machines work, one of which loses power; what was seen until then."""
    watched = Watched()
    machines = begin(network, reports, "abc")
    ends = time.monotonic() + SECONDS
    # Until many have been evicted.
    while time.monotonic() < ends or len(watched.names) < 45:
        network.check()
        watched.look(path)
        time.sleep(0.002)
    machines["c"].lose_power()
    died = time.time()
    # It may have held the lock.
    wait_for(
        lambda: network.check() or any(one.stat().st_mtime > died + 1 for one in path.rglob("*.kv")),
        3 * LEASE_SECONDS,
    )
    for name in "ab":
        (reports / f"{name}.stop").touch()
    wait_for(lambda: network.check() or not (machines["a"].on or machines["b"].on), 90)
    return watched
