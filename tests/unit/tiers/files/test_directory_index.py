"""What is known of a directory: from memory, and as new as the last refresh."""

from __future__ import annotations

import shutil
from hashlib import blake2b

import pytest

from kvferry.tiers.files.directory_index import DirectoryIndex
from kvferry.tiers.index import ListedKeys, TierKeys, tags_of
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


def test_index_follows_changed_folders(store, tmp_path):
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


def test_change_while_a_folder_is_read_is_not_lost(tmp_path):
    here, gone = names(tmp_path, 7, 2)
    come = bytes([7]) * 32

    def meanwhile(_seconds):
        listed.add(come)
        listed.discard(gone)
        listed.add(bytes([8]) * 32)

    keys = TierKeys()
    listed = ListedKeys(keys)
    DirectoryIndex(str(tmp_path), NAMESPACE.digest, listed, pause=meanwhile).refresh()
    assert list(keys.contains(tags_of([here, gone, come, bytes([8]) * 32]))) == [True, False, True, True]
    assert gone in keys.recently_evicted


def test_a_chunk_in_the_folder_of_another_first_byte_is_not_known(tmp_path):
    (here,) = names(tmp_path, 7, 1)
    folder = tmp_path / NAMESPACE.digest.hex() / "07"
    misplaced = bytes([8]) * 32
    (folder / f"{misplaced.hex()}.kv").touch()
    keys = TierKeys()
    DirectoryIndex(str(tmp_path), NAMESPACE.digest, ListedKeys(keys)).refresh()
    assert list(keys.contains(tags_of([here, misplaced]))) == [True, False]


def test_reading_a_large_folder_rests_every_five_hundred_names(tmp_path):
    made, rests, keys = names(tmp_path, 7, 2500), [], TierKeys()
    index = DirectoryIndex(str(tmp_path), NAMESPACE.digest, ListedKeys(keys), pause=rests.append)
    assert index.refresh() == 1
    assert keys.contains(tags_of(made)).all()
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
