"""The listing of a directory while others remove files and folders of it, and on a mount that fails."""

import errno
import os
from pathlib import Path

import pytest

from kvferry.tiers import paths
from kvferry.tiers.paths import EntryKind, boot_id, temporary_path, walk
from support.stores import NAMESPACE, keep, open_store

CHUNKS = 5


@pytest.fixture
def root(tmp_path):
    store = open_store(tmp_path, capacity=1 << 20)
    for number in range(CHUNKS):
        keep(store, number)
    return tmp_path


def chunks(entries):
    return [one.path for one in entries if one.kind is EntryKind.CHUNK]


def scandir_without(folder, remove):
    """Return a scandir that does not find `folder`, after it has called `remove`."""
    scandir = os.scandir

    def fake(path):
        if path == str(folder):
            remove()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return scandir(path)

    return fake


def test_a_folder_that_is_removed_during_a_listing_is_left_out(root, monkeypatch):
    assert len(chunks(walk(str(root)))) == CHUNKS
    namespace = root / NAMESPACE.digest.hex()
    gone = root.parent / f"{root.name}-gone"
    monkeypatch.setattr(paths.os, "scandir", scandir_without(namespace, lambda: namespace.rename(gone)))
    assert {one.kind for one in walk(str(root))} == {EntryKind.NOTE, EntryKind.LEDGER}


def test_a_folder_that_a_mount_denies_for_a_moment_does_not_count_as_removed(root, monkeypatch):
    namespace = root / NAMESPACE.digest.hex()
    monkeypatch.setattr(paths.os, "scandir", scandir_without(namespace, lambda: None))
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        list(walk(str(root)))


def test_files_that_are_removed_during_a_listing_are_left_out(root):
    folder = root / NAMESPACE.digest.hex() / "00"
    folder.mkdir(exist_ok=True)
    for number in range(CHUNKS):
        (folder / f"{number:064x}.kv").touch()
    listing = walk(str(root))
    first = next(one.path for one in listing if one.path.startswith(str(folder)))
    for path in set(folder.iterdir()) - {Path(first)}:
        path.unlink()
    assert not [one for one in listing if one.path.startswith(str(folder))]


@pytest.mark.parametrize("folder", ["", NAMESPACE.digest.hex(), f"{NAMESPACE.digest.hex()}/00"])
def test_a_temporary_file_counts_with_its_reserved_bytes_wherever_it_is(root, folder):
    (root / folder).mkdir(exist_ok=True)
    path = temporary_path(str(root / folder / "file"), 4096)
    Path(path).touch()
    (found,) = [one for one in walk(str(root)) if one.kind is EntryKind.TEMPORARY]
    assert (found.path, found.charged, found.size) == (path, 4096, 0)
    assert (found.namespace, found.boot) == (folder[:64], boot_id())
