"""A directory that goes, comes back, or becomes another one while stores use it."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from blake3 import blake3

from kvferry.common.errors import ConfigError
from kvferry.tiers.files.chunk_file import write_chunk
from kvferry.tiers.files.ledger import Ledger, read_ledger
from kvferry.tiers.files.tier import FileTier
from kvferry.tiers.format.chunk import ChunkGroup, ChunkSection
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.paths import MARKER, note_name
from support.chunk_files import key
from support.stores import (
    FILE_BYTES,
    GROUP,
    NAMESPACE,
    OTHER,
    fetch,
    file_of,
    keep,
    open_store,
    temporaries,
    total,
)

CAPACITY = 1 << 20


@pytest.fixture
def cache(tmp_path):
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def store(cache):
    store = open_store(cache, capacity=CAPACITY)
    assert [keep(store, number) for number in range(4)] == [PutOutcome.STORED] * 4
    return store


def goes_on(store: FileTier, cache: Path) -> None:
    """What is stored now is there, within the capacity, for a process that comes later too."""
    assert keep(store, 20) is PutOutcome.STORED
    for one in (store, open_store(cache)):
        assert fetch(one, 20) == (GetOutcome.HIT, True)
    assert read_ledger(str(cache)) == (CAPACITY, total(cache))
    assert not temporaries(cache)


def test_a_directory_that_an_operator_empties_is_furnished_again_and_keeps_its_capacity(store, cache):
    notes = {cache / MARKER, cache / note_name(NAMESPACE.digest)}
    for path in cache.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert keep(store, 9) is PutOutcome.STORED
    assert all(path.is_file() for path in notes)
    goes_on(store, cache)


def test_a_directory_that_is_removed_is_not_made_again_and_used_when_it_is_back(store, cache):
    shutil.rmtree(cache)
    assert fetch(store, 1)[0] is GetOutcome.ABSENT
    assert keep(store, 9) is PutOutcome.IO_ERROR
    assert store.refresh() == 0
    assert not store.contains([key(n) for n in range(4)]).any()
    store.usage()
    store.mark_used([key(1)])
    assert not cache.exists()
    cache.mkdir()
    goes_on(store, cache)


def test_a_directory_that_is_moved_away_is_whole_there(store, cache):
    away = cache.with_name("away")

    def moved_meanwhile(fd, chunk, body):
        write_chunk(fd, chunk, body)
        cache.rename(away)
        cache.mkdir()

    assert keep(open_store(cache, write=moved_meanwhile), 9) is PutOutcome.IO_ERROR
    goes_on(store, cache)
    moved = open_store(away)
    assert [fetch(moved, number) for number in range(4)] == [(GetOutcome.HIT, True)] * 4
    assert read_ledger(str(away)) == (CAPACITY, total(away))
    assert not temporaries(away)


def test_a_file_in_place_of_the_directory_costs_what_is_stored_meanwhile(store, cache):
    cache.rename(cache.with_name("away"))
    cache.write_text("a file")
    assert keep(store, 9) is PutOutcome.IO_ERROR
    assert fetch(store, 1)[0] is GetOutcome.IO_ERROR
    store.refresh()
    store.usage()
    assert cache.read_text() == "a file"
    cache.unlink()
    cache.with_name("away").rename(cache)
    store.refresh()
    assert fetch(store, 2) == (GetOutcome.HIT, True)
    goes_on(store, cache)


def test_the_directory_of_another_model_in_its_place_is_filled_and_not_believed(store, cache):
    other = cache.with_name("other")
    other.mkdir()
    strange = open_store(other, capacity=CAPACITY, namespace=OTHER)
    assert keep(strange, 1) is PutOutcome.STORED
    shutil.rmtree(cache)
    other.rename(cache)
    store.refresh()
    assert not store.contains([key(1)]).any()
    assert fetch(store, 1)[0] is GetOutcome.ABSENT
    goes_on(store, cache)


def ledger_of(version: int) -> bytes:
    """A ledger of a version, whose digest is right."""
    fields = struct.pack("<8s II QQ 16x", b"KVFLEDGR", version, 0, CAPACITY, 5000)
    return fields + blake3(fields).digest(16)


def a_marker(path: Path) -> None:
    (path / "kvferry.json").write_text('{"kvferry": "file tier", "directory": 3}')


def a_ledger(path: Path) -> None:
    (path / "ledger").write_bytes(ledger_of(2))


def test_the_ledger_is_what_is_specified(store, cache):
    _, used = read_ledger(str(cache))
    (cache / "ledger").write_bytes(ledger_of(1))
    assert read_ledger(str(cache)) == (CAPACITY, 5000)
    with Ledger(str(cache)).held() as account:
        account.charge(used - 5000, "")
    fields = struct.pack("<8s II QQ 16x", b"KVFLEDGR", 1, 0, CAPACITY, used)
    assert (cache / "ledger").read_bytes() == fields + blake3(fields).digest(16)


@pytest.mark.parametrize("newer", [a_marker, a_ledger])
def test_the_directory_of_a_newer_release_in_its_place_is_left_alone(
    store, cache, newer: Callable[[Path], None]
):
    number = cache.stat().st_ino
    shutil.rmtree(cache)
    cache.mkdir()
    while cache.stat().st_ino == number:  # the one that is gone had the same
        cache.rename(cache.with_name("other"))
        cache.mkdir()
    newer(cache)
    before = {one.name: one.read_bytes() for one in cache.iterdir()}
    assert keep(store, 9) is PutOutcome.IO_ERROR
    assert keep(store, 9) is PutOutcome.IO_ERROR
    assert fetch(store, 1)[0] is GetOutcome.ABSENT
    store.refresh()
    store.usage()
    assert {one.name: one.read_bytes() for one in cache.iterdir()} == before
    with pytest.raises(ConfigError, match=r"version [23], this release knows version"):
        open_store(cache)


def test_a_ledger_that_a_newer_release_has_rewritten_is_left_alone(store, cache):
    a_ledger(cache)
    assert keep(store, 9) is PutOutcome.IO_ERROR
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    assert (cache / "ledger").read_bytes() == ledger_of(2)


def test_a_mount_that_becomes_read_only_serves_and_drops_stores(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("may not mount a small disk")
    try:
        store = open_store(tmp_path, capacity=CAPACITY)
        keep(store, 1)
        keep(store, 2)
        damaged = bytearray(file_of(tmp_path, 2).read_bytes())
        damaged[5000] ^= 1
        file_of(tmp_path, 2).write_bytes(damaged)
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        store.mark_used([key(1)])
        assert fetch(store, 1) == (GetOutcome.HIT, True)
        assert fetch(store, 2)[0] is GetOutcome.CORRUPT
        assert keep(store, 3) is PutOutcome.IO_ERROR
        store.refresh()
        with pytest.raises(ConfigError, match="Read-only file system"):
            open_store(tmp_path)
        subprocess.run(["mount", "-o", "remount,rw", tmp_path], check=True)
        goes_on(store, tmp_path)
        assert keep(store, 2) is PutOutcome.PRESENT
        assert fetch(store, 2)[0] is GetOutcome.CORRUPT
        assert keep(store, 2) is PutOutcome.STORED
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_disk_that_is_full_before_the_first_file_is_refused_and_taken_when_it_has_room(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("may not mount a small disk")
    try:
        (tmp_path / "foreign").write_bytes(bytes(1 << 20))
        with pytest.raises(ConfigError, match="No space left on device"):
            open_store(tmp_path, capacity=10)
        (tmp_path / "foreign").unlink()
        store = open_store(tmp_path, capacity=900_000)
        (tmp_path / "ledger").unlink()
        fill(tmp_path)
        assert keep(store, 1) is PutOutcome.NO_SPACE, "there is no room for a ledger"
        (tmp_path / "foreign").unlink()
        assert keep(store, 1) is PutOutcome.STORED
        assert fetch(store, 1) == (GetOutcome.HIT, True)
        assert read_ledger(str(tmp_path)) == (900_000, total(tmp_path))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def fill(path: Path) -> None:
    """Write to a disk until it is full."""
    with (path / "foreign").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def stores(path: Path, first: int, begin: Barrier) -> None:
    store = open_store(path, lock_seconds=20)
    begin.wait(60)
    for number in range(first, first + 40):
        keep(store, number)


def test_processes_that_store_while_the_directory_is_swapped_leave_both_sound(cache):
    open_store(cache, capacity=30 * FILE_BYTES)
    context = get_context("fork")
    # A process that opens a directory after the first swap would not know the capacity.
    begin = context.Barrier(3)
    workers = [context.Process(target=stores, args=(cache, first, begin)) for first in (100, 200)]
    for one in workers:
        one.start()
    begin.wait(60)
    paths = [cache]
    for number in range(5):
        away = cache.with_name(f"away{number}")
        workers[0].join(0.05)
        cache.rename(away)
        cache.mkdir()
        paths.append(away)
    for one in workers:
        one.join(60)
        assert one.exitcode == 0
    for path in paths:
        store = open_store(path)
        assert not temporaries(path)
        assert read_ledger(str(path))[1] == total(path) <= 30 * FILE_BYTES
        for number in (*range(100, 140), *range(200, 240)):
            done, right = fetch(store, number)
            assert done is GetOutcome.ABSENT or right


WIDE = ChunkGroup("full", 64, (ChunkSection("k", 2, 14 << 10), ChunkSection("v", 4, 7 << 10)))


def test_files_of_other_keys_namespaces_and_groups_are_never_taken(store, cache):
    other = open_store(cache, namespace=OTHER)
    assert keep(other, 0) is PutOutcome.STORED
    here = file_of(cache, 0)
    swapped = cache / OTHER.digest.hex() / here.parent.name / here.name
    one, two = here.read_bytes(), swapped.read_bytes()
    here.write_bytes(two)
    swapped.write_bytes(one)
    file_of(cache, 1).write_bytes(file_of(cache, 2).read_bytes())
    for number, group in ((0, GROUP), (1, GROUP), (0, WIDE)):
        assert fetch(store, number, group)[0] in (GetOutcome.CORRUPT, GetOutcome.ABSENT)
    assert fetch(other, 0)[0] is GetOutcome.CORRUPT
    assert fetch(store, 3, WIDE)[0] is GetOutcome.OTHER_SHAPE
    assert fetch(store, 3) == (GetOutcome.HIT, True)
    assert (store.stats.quarantined, other.stats.quarantined) == (2, 1)
    goes_on(store, cache)
