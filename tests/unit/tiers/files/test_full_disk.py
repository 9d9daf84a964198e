"""A file system that is full before the capacity is used up: the oldest chunks go for new ones."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tiers.files import tier as tier_module
from kvferry.tiers.files.admin import DirectoryAdmin
from kvferry.tiers.files.ledger import read_ledger
from kvferry.tiers.files.tier import write_chunk
from kvferry.tiers.format.chunk import ChunkGroup, ChunkSection
from kvferry.tiers.names import GetOutcome, PutOutcome
from support.chunk_files import key
from support.stores import FILE_BYTES, OTHER, fetch, file_of, keep, open_store, temporaries, total

CAPACITY = 4 << 20
SMALL = ChunkGroup("full", 64, (ChunkSection("k", 2, 2048),))


def chunks(root: Path) -> set[int]:
    return {number for number in range(300) if file_of(root, number).exists()}


def refuse_new(monkeypatch, refuses) -> None:
    """Have the file system refuse new files and folders: `refuses` returns the errno for a path, or 0."""
    real_open, real_mkdir = os.open, os.mkdir

    def checked(path: str) -> None:
        if number := refuses(Path(path)):
            raise OSError(number, os.strerror(number), path)

    def open_(path, flags, *args, **kwargs):
        if flags & os.O_EXCL:
            checked(path)
        return real_open(path, flags, *args, **kwargs)

    def mkdir(path, *args, **kwargs):
        if not os.path.lexists(path):
            checked(path)
        return real_mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "mkdir", mkdir)


@pytest.fixture
def few_inodes(tmp_path):
    """A file system of 8 MiB and 120 inodes."""
    where = tmp_path / "disk"
    where.mkdir()
    options = "size=8m,nr_inodes=120,mode=700"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", where], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield where
    subprocess.run(["umount", where], check=True)


def test_a_twentieth_of_the_inodes_stays_free_and_the_log_says_so(few_inodes, clock, caplog):
    store = open_store(few_inodes, capacity=CAPACITY, clock=clock)
    least = 120
    for number in range(150):
        clock.now += 60
        assert keep(store, number, SMALL) is PutOutcome.STORED
        least = min(least, os.statvfs(few_inodes).f_favail)
    kept = chunks(few_inodes)
    assert kept == set(range(150 - len(kept), 150))
    assert len(kept) > 50
    assert store.stats.evicted == 150 - len(kept)
    assert read_ledger(str(few_inodes)) == (CAPACITY, total(few_inodes))
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert re.search(r"runs out of inodes before the capacity is used up: [2-5] of 120 are free", said)
    assert "use a file system with more inodes" in said
    free = os.statvfs(few_inodes).f_favail
    assert DirectoryAdmin(few_inodes).space().free_files == free < 20
    assert least >= 4, "a new chunk may take a folder beside its file"


def test_inodes_that_others_take_later_are_made_up_for(few_inodes, clock):
    store = open_store(few_inodes, capacity=CAPACITY, clock=clock)
    for number in range(60):
        clock.now += 60
        keep(store, number, SMALL)
    for number in range(os.statvfs(few_inodes).f_favail):
        (few_inodes / f"foreign{number}").touch()
    for number in range(60, 80):
        clock.now += 60
        assert keep(store, number, SMALL) is PutOutcome.STORED
    assert os.statvfs(few_inodes).f_favail >= 5
    assert chunks(few_inodes) >= set(range(70, 80))


def test_chunks_beyond_the_write_budget_evict_nothing_where_inodes_are_few(few_inodes, clock):
    store = open_store(few_inodes, capacity=CAPACITY, clock=clock)
    for number in range(60):
        clock.now += 60
        keep(store, number, SMALL)
    before = chunks(few_inodes)
    limited = open_store(few_inodes, clock=clock, write_per_day=1)
    done = [keep(limited, number, SMALL) for number in range(60, 70)]
    assert done == [PutOutcome.STORED] + [PutOutcome.OVER_BUDGET] * 9
    assert len(before - chunks(few_inodes)) <= 3


def test_disks_whose_inodes_others_hold_keep_the_newest_chunk(few_inodes, clock):
    for number in range(100):
        (few_inodes / f"foreign{number}").touch()
    store = open_store(few_inodes, capacity=CAPACITY, clock=clock)
    for number in range(20):
        clock.now += 60
        assert keep(store, number, SMALL) is PutOutcome.STORED
    assert 19 in chunks(few_inodes)


def test_an_engine_with_another_model_starts_on_a_disk_without_a_free_inode(few_inodes):
    store = open_store(few_inodes, capacity=CAPACITY)
    for number in range(60):
        keep(store, number, SMALL)
    other = open_store(few_inodes, namespace=OTHER)
    assert keep(other, 1, SMALL) is PutOutcome.STORED


def test_a_directory_without_chunks_and_inodes_is_refused_in_words(few_inodes):
    for number in range(118):
        (few_inodes / f"foreign{number}").touch()
    with pytest.raises(ConfigError, match=r"no inode is free, but 8\.00 MiB are .*; remove files there"):
        open_store(few_inodes, capacity=CAPACITY)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_with_all_files_of_a_quota_in_use_the_oldest_chunks_go(tmp_path, clock, monkeypatch, number):
    store = open_store(tmp_path, capacity=CAPACITY, clock=clock)
    refuse_new(monkeypatch, lambda _: number if len(list(tmp_path.rglob("*"))) >= 60 else 0)
    for chunk in range(60):
        clock.now += 60
        assert keep(store, chunk, SMALL) is PutOutcome.STORED
    kept = chunks(tmp_path)
    assert kept == set(range(60 - len(kept), 60))
    assert len(kept) > 20


def test_with_all_bytes_of_a_quota_in_use_as_many_go_as_are_needed(tmp_path, clock):
    def limited(fd, chunk, body):
        if total(tmp_path) + chunk.file_bytes > 10 * FILE_BYTES:
            os.write(fd, bytes(4096))
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        write_chunk(fd, chunk, body)

    store = open_store(tmp_path, capacity=CAPACITY, clock=clock, write=limited)
    for number in range(40):
        clock.now += 60
        keep(store, number, SMALL)
    for number in range(100, 110):
        clock.now += 60
        assert keep(store, number) is PutOutcome.STORED
    assert total(tmp_path) <= 10 * FILE_BYTES
    assert chunks(tmp_path) >= set(range(102, 110))
    assert not temporaries(tmp_path)
    assert read_ledger(str(tmp_path)) == (CAPACITY, total(tmp_path))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMLINK])
def test_in_a_folder_that_is_full_one_of_its_own_chunks_goes(tmp_path, monkeypatch, number):
    store = open_store(tmp_path, capacity=CAPACITY)
    same = [one for one in range(300, 5000) if key(one)[0] == key(1)[0]][:5]
    for one in (*(one for one in range(2, 40) if key(one)[0] != key(1)[0]), *same):
        keep(store, one, SMALL)

    def full(path: Path) -> int:
        return number if path.suffix == ".tmp" and len(list(path.parent.glob("*.kv"))) >= 5 else 0

    refuse_new(monkeypatch, full)
    assert keep(store, 1, SMALL) is PutOutcome.STORED
    assert [file_of(tmp_path, one).exists() for one in same] == [False, *[True] * 4]
    assert store.stats.evicted == 2


def test_a_disk_that_stays_full_whatever_goes_does_not_cost_the_cache(tmp_path, clock, monkeypatch):
    store = open_store(tmp_path, capacity=CAPACITY, clock=clock)
    for number in range(40):
        keep(store, number, SMALL)
    refuse_new(monkeypatch, lambda path: errno.ENOSPC if path.suffix == ".tmp" else 0)
    assert {keep(store, number, SMALL) for number in range(100, 130)} == {PutOutcome.NO_SPACE}
    assert len(chunks(tmp_path)) >= 37
    monkeypatch.undo()
    assert keep(store, 100, SMALL) is PutOutcome.STORED
    refuse_new(monkeypatch, lambda path: errno.ENOSPC if len(chunks(tmp_path)) >= 30 else 0)
    assert keep(store, 101, SMALL) is PutOutcome.NO_SPACE
    for _ in range(6):
        clock.now += 61
        keep(store, 101, SMALL)
    assert keep(store, 101, SMALL) is PutOutcome.PRESENT


def test_folders_of_earlier_models_do_not_keep_their_inodes_for_ever(tmp_path, clock, monkeypatch):
    earlier = open_store(tmp_path, capacity=CAPACITY, namespace=OTHER, clock=clock)
    for number in range(20):
        clock.now += 60
        keep(earlier, number, SMALL)
    store = open_store(tmp_path, capacity=CAPACITY, clock=clock)
    refuse_new(monkeypatch, lambda _: errno.ENOSPC if len(list(tmp_path.rglob("*"))) >= 60 else 0)
    for number in range(80):
        clock.now += 60
        assert keep(store, number, SMALL) is PutOutcome.STORED
    assert len(chunks(tmp_path)) > 20
    assert not [path for path in (tmp_path / OTHER.digest.hex()).iterdir() if path.is_dir()]


def test_a_bad_chunk_that_a_full_disk_cannot_move_aside_is_removed(tmp_path, monkeypatch):
    store = open_store(tmp_path, capacity=CAPACITY)
    keep(store, 1, SMALL)
    bad = bytearray(file_of(tmp_path, 1).read_bytes())
    bad[-1] ^= 1
    file_of(tmp_path, 1).write_bytes(bad)

    def full(one, other):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", full)
    assert fetch(store, 1, SMALL)[0] is GetOutcome.CORRUPT
    monkeypatch.undo()
    assert read_ledger(str(tmp_path))[1] == total(tmp_path)
    assert keep(store, 1, SMALL) is PutOutcome.STORED


@pytest.mark.parametrize("at", ["after it was created", "while it is created"])
def test_a_folder_that_an_eviction_removes_before_its_first_chunk_is_created_again(tmp_path, monkeypatch, at):
    store = open_store(tmp_path)
    create, gone = tier_module.make_folder, []

    def make_folder(root: str, folder: str) -> None:
        create(root, folder)
        if len(gone) < 3:
            Path(folder).rmdir()
            gone.append(folder)
            if at == "while it is created":
                raise FileNotFoundError(folder)

    monkeypatch.setattr(tier_module, "make_folder", make_folder)
    assert keep(store, 1) is PutOutcome.STORED
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    assert len(gone) == 3
    store.close()
