"""What is known of a directory: from memory, and as new as the last refresh."""

from __future__ import annotations

import shutil
from hashlib import blake2b

import pytest

from kvferry.tiers.files.directory_index import DirectoryIndex
from kvferry.tiers.index.key_table import TierKeys, tags_of
from kvferry.tiers.paths import key_of, keys_of
from support.chunk_files import key
from support.stores import NAMESPACE, file_of, keep, open_store

NAME = "0123456789abcdef" * 4


def names(path, bucket, count):
    """Make empty files for keys of one first byte; returns the keys."""
    made = [bytes([bucket]) + blake2b(b"%d" % n, digest_size=31).digest() for n in range(count)]
    folder = path / NAMESPACE.digest.hex() / f"{bucket:02x}"
    folder.mkdir(parents=True)
    for one in made:
        (folder / f"{one.hex()}.kv").touch()
    return made


def test_it_follows_the_folders_that_changed(store, tmp_path):
    other = open_store(tmp_path)
    for number in range(8):
        keep(other, number)
    assert store.refresh() == len({key(number)[0] for number in range(8)})
    assert len(store) == 8
    assert store.refresh() == 0
    file_of(tmp_path, 3).unlink()
    assert store.refresh() == 1
    assert len(store) == 7
    keep(store, 30)
    shutil.rmtree(tmp_path / NAMESPACE.digest.hex())
    store.refresh()
    assert len(store) == 0


def test_a_folder_that_changed_just_now_is_read_again(tmp_path):
    store = open_store(tmp_path, capacity=1 << 20)
    keep(store, 1)
    assert (store.refresh(), store.refresh()) == (1, 1)


def test_what_comes_and_goes_while_a_folder_is_read_is_not_forgotten(tmp_path):
    here, gone = names(tmp_path, 7, 2)
    come = bytes([7]) * 32

    def meanwhile(_seconds):
        index.add(come)
        index.discard(gone)
        index.add(bytes([8]) * 32)

    tags = TierKeys()
    index = DirectoryIndex(str(tmp_path), NAMESPACE.digest, tags, rest=meanwhile)
    index.refresh()
    assert list(tags.known(tags_of([here, gone, come, bytes([8]) * 32]))) == [True, False, True, True]


def test_reading_a_large_folder_rests_every_five_hundred_names(tmp_path):
    made, rests, tags = names(tmp_path, 7, 2500), [], TierKeys()
    index = DirectoryIndex(str(tmp_path), NAMESPACE.digest, tags, rest=rests.append)
    assert index.refresh() == 1
    assert tags.known(tags_of(made)).all()
    assert len(rests) == 5
    assert min(rests) >= 0.001


@pytest.mark.parametrize(
    "name",
    [f"{NAME}.kv", f"{NAME[:32]}.kv", f"{NAME}00.kv", f"{NAME[:31]}.kv", f"{NAME[:33]}.kv", f"{NAME}.kv\n",
     f"\n{NAME}.kv", f" {NAME}.kv", f"{NAME}.kv2", f"{NAME}.KV", f"{NAME.upper()}.kv", f"{NAME}xkv", ".kv",
     f".{NAME}.4096.ab.{NAME[:16]}.tmp", "", "\udc80"],
)  # fmt: skip
def test_names_are_read_together_as_each_alone(name):
    other = f"{NAME[::-1]}.kv"
    alone = [] if key_of(name) is None else [key_of(name)]
    assert keys_of([name]) == alone
    assert keys_of([other, name, other]) == [key_of(other), *alone, key_of(other)]
