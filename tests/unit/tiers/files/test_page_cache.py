"""The newest chunk files stay in the page cache, within a share of the memory, and are read from there."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from kvferry.tiers.files import chunk_file
from kvferry.tiers.files.chunk_file import set_direct
from kvferry.tiers.files.page_cache import KeptFiles, in_page_cache
from kvferry.tiers.names import GetOutcome, PutOutcome
from support.stores import FILE_BYTES, fetch, file_of, keep, open_store, temporaries

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


def test_the_newest_files_stay_in_the_page_cache(tmp_path):
    store = open_store(tmp_path, page_cache=ROOM)
    for number in range(10):
        assert keep(store, number) is PutOutcome.STORED
    assert cached(tmp_path, range(10)) == [6, 7, 8, 9]


def test_by_default_files_take_a_tenth_of_the_memory(tmp_path):
    room = [10 * ROOM]
    kept = KeptFiles(str(tmp_path), memory=lambda: (room[0], "of a test"))
    assert [kept.fits(size) for size in (ROOM, ROOM + 1)] == [True, False]
    store = open_store(tmp_path, page_cache=0)
    for number in range(6):
        keep(store, number)
        file_of(tmp_path, number).read_bytes()
        kept.add(str(file_of(tmp_path, number)), FILE_BYTES)
    assert cached(tmp_path, range(6)) == [2, 3, 4, 5]
    room[0] //= 2
    kept.adjust()
    assert cached(tmp_path, range(6)) == [4, 5]
    assert not kept.fits(ROOM)


@pytest.mark.parametrize("room", [0, FILE_BYTES - 1])
def test_a_file_without_room_goes_past_the_page_cache(tmp_path, room):
    store = open_store(tmp_path, page_cache=room)
    keep(store, 1)
    assert cached(tmp_path, [1]) == []
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    assert cached(tmp_path, [1]) == [], "a read does not bring it there either"


@pytest.mark.parametrize("room", [ROOM, 0], ids=["kept", "past it"])
def test_a_file_is_read_from_where_it_is(tmp_path, monkeypatch, room):
    store, move, modes = open_store(tmp_path, page_cache=room), os.preadv, []

    def seen(fd, *args):
        modes.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return move(fd, *args)

    keep(store, 1)
    monkeypatch.setattr(os, "preadv", seen)
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    assert set(modes) == {room == 0}


def test_a_file_that_was_evicted_meanwhile_is_forgotten(tmp_path):
    store = open_store(tmp_path, page_cache=ROOM)
    for number in range(4):
        keep(store, number)
    file_of(tmp_path, 0).unlink()
    keep(store, 4)
    keep(store, 5)
    assert cached(tmp_path, range(1, 6)) == [2, 3, 4, 5]


def test_a_disk_that_refuses_what_the_page_cache_took_is_an_error_of_the_store(tmp_path, monkeypatch):
    def broken(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = open_store(tmp_path, page_cache=ROOM)
    with monkeypatch.context() as patch:
        patch.setattr(chunk_file, "finish_writeback", broken)
        assert keep(store, 1) is PutOutcome.IO_ERROR
    assert not temporaries(tmp_path)
    assert not file_of(tmp_path, 1).exists()
    assert keep(store, 1) is PutOutcome.STORED


def test_a_stored_file_is_clean_in_the_page_cache(tmp_path):
    keep(open_store(tmp_path, page_cache=ROOM), 1)
    with file_of(tmp_path, 1).open("rb") as file:
        # The kernel drops clean pages only.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert cached(tmp_path, [1]) == []


def test_nothing_is_kept_of_a_file_system_without_a_device():
    memory = Path("/dev/shm")
    if not memory.is_dir() or os.major(memory.stat().st_dev):
        pytest.skip("there is no file system without a device")
    assert not KeptFiles(str(memory), ROOM).fits(1)


@pytest.mark.parametrize("size", [1, 4096, 5000])
def test_a_file_shorter_than_expected_is_not_in_the_page_cache(tmp_path, size):
    (tmp_path / "short").write_bytes(bytes(size))
    with (tmp_path / "short").open("rb") as file:
        assert in_page_cache(file.fileno(), size)
        assert not in_page_cache(file.fileno(), size + 1)
