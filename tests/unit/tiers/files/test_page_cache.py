"""The newest chunk files are brought into the page cache, within a share of memory, and read from there."""

from __future__ import annotations

import fcntl
import os
from functools import partial
from pathlib import Path

import pytest

from kvferry.tiers.files.chunk_file import read_chunk, set_direct, write_chunk
from kvferry.tiers.files.page_cache import CachedFiles, in_page_cache
from kvferry.tiers.names import GetOutcome, PutOutcome
from support.stores import FILE_BYTES, fetch, file_of, keep, open_store

ROOM = 4 * FILE_BYTES


@pytest.fixture(autouse=True)
def has_direct_io(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "trial", os.O_RDWR | os.O_CREAT)
    direct = set_direct(fd, on=True)
    os.close(fd)
    (tmp_path / "trial").unlink()
    if not direct or os.major(tmp_path.stat().st_dev) == 0:
        pytest.skip("this folder is on no disk with direct I/O")


def cached(path: Path, numbers) -> list[int]:
    """The chunks whose files are in the page cache."""
    found = []
    for number in numbers:
        with file_of(path, number).open("rb") as file:
            if in_page_cache(file.fileno(), FILE_BYTES):
                found.append(number)
    return found


def test_a_refresh_brings_the_newest_files_into_the_page_cache(tmp_path):
    store = open_store(tmp_path, page_cache=ROOM)
    for number in range(6):
        assert keep(store, number) is PutOutcome.STORED
    assert cached(tmp_path, range(6)) == [], "a store goes past it"
    store.refresh()
    assert cached(tmp_path, range(6)) == [2, 3, 4, 5]
    keep(store, 6)
    store.refresh()
    assert cached(tmp_path, range(7)) == [3, 4, 5, 6]


def test_by_default_files_take_a_tenth_of_the_memory(tmp_path):
    room = [10 * ROOM]
    store = open_store(tmp_path, page_cache=0)
    files = CachedFiles(str(tmp_path), memory=lambda: (room[0], "of a test"))
    for number in range(6):
        keep(store, number)
        files.add(str(file_of(tmp_path, number)), FILE_BYTES)
    files.refresh()
    assert cached(tmp_path, range(6)) == [2, 3, 4, 5]
    room[0] //= 2
    files.refresh()
    assert cached(tmp_path, range(6)) == [4, 5]


@pytest.mark.parametrize("room", [0, FILE_BYTES - 1])
def test_a_file_without_room_stays_out_of_the_page_cache(tmp_path, room):
    store = open_store(tmp_path, page_cache=room)
    keep(store, 1)
    store.refresh()
    assert cached(tmp_path, [1]) == []
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    assert cached(tmp_path, [1]) == [], "a read does not bring it there either"


@pytest.mark.parametrize("room", [ROOM, 0], ids=["cached", "on disk"])
def test_a_file_is_read_from_where_it_is(tmp_path, monkeypatch, room):
    store, move, modes = open_store(tmp_path, page_cache=room), os.preadv, []

    def seen(fd, *args):
        modes.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return move(fd, *args)

    keep(store, 1)
    store.refresh()
    monkeypatch.setattr(os, "preadv", seen)
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    assert set(modes) == {room == 0}


def test_no_file_is_brought_in_while_the_tier_uses_the_disk(tmp_path):
    found = []

    def during(call, *args):
        if file_of(tmp_path, 1).exists():
            store.refresh()
            found.append(cached(tmp_path, [1]))
        return call(*args)

    store = open_store(
        tmp_path, page_cache=ROOM, write=partial(during, write_chunk), read=partial(during, read_chunk)
    )
    keep(store, 1)
    keep(store, 2)
    fetch(store, 2)
    assert found == [[], []]
    store.refresh()
    assert cached(tmp_path, [1, 2]) == [1, 2]


def test_a_file_that_was_evicted_meanwhile_is_no_error(tmp_path):
    store = open_store(tmp_path, page_cache=ROOM)
    for number in range(4):
        keep(store, number)
    file_of(tmp_path, 0).unlink()
    store.refresh()
    file_of(tmp_path, 1).unlink()
    keep(store, 4)
    keep(store, 5)
    store.refresh()
    assert cached(tmp_path, range(2, 6)) == [2, 3, 4, 5]


def test_nothing_is_brought_in_of_a_file_system_without_a_device(monkeypatch, tmp_path):
    major = os.major
    store = open_store(tmp_path, page_cache=ROOM)
    keep(store, 1)
    monkeypatch.setattr(os, "major", lambda device: 0 * major(device))
    files = CachedFiles(str(tmp_path), ROOM)
    files.add(str(file_of(tmp_path, 1)), FILE_BYTES)
    files.refresh()
    assert cached(tmp_path, [1]) == []


@pytest.mark.parametrize("size", [1, 4096, 5000])
def test_a_file_shorter_than_expected_is_not_in_the_page_cache(tmp_path, size):
    (tmp_path / "short").write_bytes(bytes(size))
    with (tmp_path / "short").open("rb") as file:
        assert in_page_cache(file.fileno(), size)
        assert not in_page_cache(file.fileno(), size + 1)
