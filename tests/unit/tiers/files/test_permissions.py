"""Who can read and write what the file tier makes."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from kvferry.tiers.files.opening import writable_by_others
from kvferry.tiers.host.arena import Arena
from kvferry.tiers.names import GetOutcome
from support.stores import FILE_BYTES, die_while_writing, fetch, file_of, keep, open_store, temporaries

pytestmark = pytest.mark.slow


@pytest.fixture
def cache(tmp_path):
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_files_are_private_to_the_user_whatever_the_umask(cache, umask):
    before = os.umask(umask)
    try:
        store = open_store(cache, capacity=5 * FILE_BYTES)
        for number in range(6):
            keep(store, number)
        file_of(cache, 5).write_bytes(b"damaged")
        assert fetch(store, 5)[0] is GetOutcome.CORRUPT
        die_while_writing(cache, 7)
    finally:
        os.umask(before)
    paths = list(cache.rglob("*"))
    assert len(list((cache / "quarantine").iterdir())) == 1
    assert len(temporaries(cache)) == 1
    modes = {(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in paths}
    assert modes == {(True, 0o700), (False, 0o600)}


@pytest.mark.parametrize(
    ("mode", "says"),
    [(0o700, ""), (0o755, ""), (0o770, "has mode 770, so others can write"), (0o1777, "has mode 1777")],
)
def test_a_directory_that_others_can_write_to_is_told(cache, caplog, mode, says):
    cache.chmod(mode)
    open_store(cache, capacity=1 << 20)
    told = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(told) == bool(says)
    assert not says or (
        says in told[0] and "a chunk that they write is used like the engine's own" in told[0]
    )


def test_a_folder_above_that_others_can_write_to_is_told_unless_it_is_sticky(tmp_path, cache):
    assert not writable_by_others(str(cache))
    tmp_path.chmod(0o777)
    assert writable_by_others(str(cache)) == f"{tmp_path} has mode 777, so others can write there"
    tmp_path.chmod(0o1777)
    assert not writable_by_others(str(cache))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_directory_of_another_user_is_told(cache):
    os.chown(cache, 12345, -1)
    assert writable_by_others(str(cache)) == f"{cache} belongs to user 12345"


def refused_to_others(path: str) -> bool:
    """Whether another user, in a process of its own, cannot open a file or list a folder."""
    child = os.fork()
    if not child:
        told = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.close(os.open(path, os.O_RDONLY))
        except PermissionError:
            told = 0
        finally:
            os._exit(told)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_can_open_neither_chunks_nor_host_memory():
    folder = Path(tempfile.mkdtemp())  # pytest's own are closed to others
    before = os.umask(0)
    arena = Arena.create(1 << 20)
    try:
        folder.chmod(0o755)
        keep(open_store(folder, capacity=1 << 20), 1)
        memory = Path(f"/proc/{arena.handle.pid}/fd/{arena.handle.fd}")
        assert memory.stat().st_size == arena.handle.size
        for path in (*folder.rglob("*"), memory):
            assert refused_to_others(str(path)), path
        assert not refused_to_others(str(folder))
    finally:
        os.umask(before)
        arena.close()
        shutil.rmtree(folder)
