"""The file tier with keys, over real directories."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tiers.admin import namespace_usage, verify_all
from kvferry.tiers.files import chunk_file, tier as tier_module
from kvferry.tiers.files.admin import DirectoryAdmin
from kvferry.tiers.files.ledger import read_ledger
from kvferry.tiers.files.opening import check_directory
from kvferry.tiers.files.tier import FileSettings, FileTier
from kvferry.tiers.format.chunk import SEGMENT_BYTES, ChunkGroup, ChunkSection
from kvferry.tiers.index import KeyTable
from kvferry.tiers.names import GetOutcome, PutOutcome
from support.chunk_files import verify_bytes
from support.encrypted import (
    BODY,
    GROUP,
    HEADER_TAG,
    PARTS,
    SEGMENTS,
    TAGS,
    encrypted_chunk,
    keys,
    segment,
    swap_segments,
    with_digests,
    write_keys,
)
from support.objects import warnings
from support.stores import NAMESPACE, body, fetch, file_of, keep, open_store, sections, total

# Several pieces of storage, and a last one that is no whole segment.
LARGE = ChunkGroup("full", 64, (ChunkSection("k", 3, 3 << 20), ChunkSection("v", 3, (1 << 20) + 11)))
MISSES = {GetOutcome.CORRUPT, GetOutcome.OTHER_KEY, GetOutcome.OTHER_SHAPE}


def opened(path: Path, *ids: str, **options) -> FileTier:
    return open_store(path, encryption=keys(*ids) if ids else None, **{"capacity": 1 << 27, **options})


@pytest.fixture
def cache(tmp_path) -> Path:
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def stored(cache) -> bytes:
    """The file of chunk 1, encrypted with key `a`."""
    assert keep(opened(cache, "a"), 1, GROUP) is PutOutcome.STORED
    return file_of(cache, 1).read_bytes()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("group", [GROUP, LARGE])
def test_a_chunk_comes_back_after_a_restart(cache, monkeypatch, cached, group):
    store = opened(cache, "a")
    assert keep(store, 1, group) is PutOutcome.STORED
    assert keep(store, 1, group) is PutOutcome.PRESENT
    monkeypatch.setattr(chunk_file, "in_page_cache", lambda *_: cached)
    assert fetch(store, 1, group) == (GetOutcome.HIT, True)
    store.close()
    again = opened(cache, "a")
    assert fetch(again, 1, group) == (GetOutcome.HIT, True)
    assert read_ledger(str(cache))[1] == total(cache)


def test_nothing_of_a_chunk_is_on_the_disk(cache):
    keep(opened(cache, "a"), 1, GROUP)
    files = [path.read_bytes() for path in cache.rglob("*") if path.is_file()]
    for part in sections(GROUP, body(1, GROUP)):
        assert not any(
            bytes(part[at : at + 16]) in data for at in range(0, len(part), 4096) for data in files
        )


def test_nothing_repeats_when_a_chunk_is_encrypted_again(cache, stored):
    file_of(cache, 1).unlink()
    keep(opened(cache, "a"), 1, GROUP)
    again = file_of(cache, 1).read_bytes()
    pieces = [{data[at : at + 16] for at in range(BODY, len(data), 16)} for data in (stored, again)]
    assert pieces[0].isdisjoint(pieces[1]), "neither a key stream nor a nonce is used again"
    assert len(pieces[0]) == (len(stored) - BODY) // 16, "nor within a file"


def test_the_file_is_what_is_specified(stored):
    header = verify_bytes(stored)
    assert header.chunk == encrypted_chunk(1)
    assert header.chunk.offsets[0] == BODY
    assert header.encryption.key_id == "a"
    assert stored[TAGS : TAGS + 16 * SEGMENTS] == header.encryption.tags
    assert stored[HEADER_TAG : HEADER_TAG + 16] == header.encryption.header_tag


@pytest.mark.parametrize("forged", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_a_changed_byte_anywhere_is_a_miss(cache, stored, part, forged):
    data = bytearray(stored)
    data[PARTS[part]] ^= 1
    if forged:
        with_digests(data)
    file_of(cache, 1).write_bytes(data)
    if data == stored:
        assert part in ("digest", "digest of the header"), "a forger puts the right digest back"
        return
    store = opened(cache, "a")
    assert fetch(store, 1, GROUP)[0] in MISSES
    assert keep(store, 1, GROUP) is PutOutcome.STORED
    assert fetch(store, 1, GROUP) == (GetOutcome.HIT, True)


def test_swapped_segments_are_a_miss(cache, stored):
    data = bytearray(stored)
    swap_segments(data)
    file_of(cache, 1).write_bytes(with_digests(data))
    assert fetch(opened(cache, "a"), 1, GROUP)[0] in MISSES


@pytest.mark.parametrize("number", range(SEGMENTS))
def test_a_segment_of_another_file_of_the_same_chunk_is_a_miss(cache, stored, number):
    file_of(cache, 1).unlink()
    keep(opened(cache, "a"), 1, GROUP)
    data = bytearray(file_of(cache, 1).read_bytes())
    data[segment(data, number)] = stored[segment(data, number)]
    file_of(cache, 1).write_bytes(data)
    assert fetch(opened(cache, "a"), 1, GROUP)[0] is GetOutcome.CORRUPT
    at = TAGS + 16 * number
    data[at : at + 16] = stored[at : at + 16]
    file_of(cache, 1).write_bytes(with_digests(data))
    assert fetch(opened(cache, "a"), 1, GROUP)[0] is GetOutcome.OTHER_KEY


@pytest.mark.parametrize("forged", [False, True])
def test_the_file_of_another_chunk_is_a_miss(cache, stored, forged):
    data = bytearray(stored)
    if forged:
        data[65:81] = encrypted_chunk(2).key
        with_digests(data)
    file_of(cache, 2).parent.mkdir(exist_ok=True)
    file_of(cache, 2).write_bytes(data)
    outcome = fetch(opened(cache, "a"), 2, GROUP)[0]
    assert outcome is (GetOutcome.OTHER_KEY if forged else GetOutcome.CORRUPT)


@pytest.mark.parametrize("size", [0, 100, 200, BODY, BODY + 5, BODY + SEGMENT_BYTES + 1, -1, -4096])
def test_a_file_that_is_cut_off_is_a_miss(cache, stored, size):
    file_of(cache, 1).write_bytes(stored[:size])
    assert fetch(opened(cache, "a"), 1, GROUP)[0] is GetOutcome.CORRUPT


def test_a_file_that_shrinks_during_a_fetch_is_a_miss(cache, monkeypatch, caplog):
    keep(opened(cache, "a"), 1, LARGE)
    store, size = opened(cache, "a"), file_of(cache, 1).stat().st_size

    def cut(*args, direct):
        os.truncate(file_of(cache, 1), size - 4096)
        return read_more(*args, direct=direct)

    read_more = chunk_file._read_more
    monkeypatch.setattr(chunk_file, "_read_more", cut)
    monkeypatch.setattr(chunk_file, "in_page_cache", lambda *_: False)
    assert fetch(store, 1, LARGE)[0] is GetOutcome.CORRUPT
    assert f"the file ends after {size - 4096} of {size} bytes" in caplog.text


def test_a_chunk_that_is_not_encrypted_is_a_miss(cache, stored, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    keep(opened(plain), 1, GROUP)
    shutil.copy(file_of(plain, 1), file_of(cache, 1))
    assert fetch(opened(cache, "a"), 1, GROUP)[0] is GetOutcome.CORRUPT


def test_a_chunk_of_another_group_is_a_miss_and_stays(cache, stored):
    many = ChunkGroup("full", 64, tuple(ChunkSection(f"s{number}", 1, 4096) for number in range(250)))
    assert fetch(opened(cache, "a"), 1, many)[0] is GetOutcome.OTHER_SHAPE
    assert fetch(opened(cache, "a"), 1, GROUP) == (GetOutcome.HIT, True)
    keep(opened(cache, "a"), 2, many)
    small = ChunkGroup("full", 64, (ChunkSection("k", 1, 4096),))
    # The header of the file is longer than the whole file that is expected.
    assert fetch(opened(cache, "a"), 2, small)[0] is GetOutcome.OTHER_SHAPE
    assert fetch(opened(cache, "a"), 2, many) == (GetOutcome.HIT, True)


def test_keys_are_rotated(cache, stored, caplog):
    both = opened(cache, "b", "a")
    assert fetch(both, 1, GROUP) == (GetOutcome.HIT, True)
    keep(both, 2, GROUP)
    assert verify_bytes(file_of(cache, 2).read_bytes()).encryption.key_id == "b"
    assert fetch(opened(cache, "a", "b"), 2, GROUP) == (GetOutcome.HIT, True)
    keep(both, 3, GROUP)
    file_of(cache, 3).write_bytes(file_of(cache, 3).read_bytes())
    keep(opened(cache, "a"), 4, GROUP)
    caplog.clear()

    new = opened(cache, "b")
    assert fetch(new, 2, GROUP) == (GetOutcome.HIT, True)
    for number in (1, 4):
        assert fetch(new, number, GROUP)[0] is GetOutcome.OTHER_KEY
    assert new.stats.gets[GetOutcome.OTHER_KEY] == 2
    [said] = warnings(caplog)
    assert "is encrypted with key 'a', which key_file does not have" in said
    assert "give all engines of the directory the same keys" in said
    assert file_of(cache, 1).read_bytes() == stored, "other engines may have the key"
    assert not list((cache / "quarantine").iterdir())

    assert keep(new, 1, GROUP) is PutOutcome.STORED
    assert fetch(new, 1, GROUP) == (GetOutcome.HIT, True)
    assert keep(new, 1, GROUP) is PutOutcome.PRESENT
    assert read_ledger(str(cache))[1] == total(cache)


def test_a_file_that_another_engine_has_replaced_is_not_replaced_again(cache, stored):
    new = opened(cache, "b")
    assert fetch(new, 1, GROUP)[0] is GetOutcome.OTHER_KEY
    file_of(cache, 1).unlink()
    keep(opened(cache, "b"), 1, GROUP)
    there = file_of(cache, 1).read_bytes()
    assert keep(new, 1, GROUP) is PutOutcome.PRESENT
    assert file_of(cache, 1).read_bytes() == there


def test_another_key_of_the_same_id_is_told(cache, stored, caplog):
    other = type(keys("a"))((type(keys("a").newest)("a", bytes(32)),))
    assert fetch(open_store(cache, encryption=other), 1, GROUP)[0] is GetOutcome.OTHER_KEY
    assert "not one of key 'a': another key has this id elsewhere, or the header was forged" in caplog.text
    assert file_of(cache, 1).read_bytes() == stored


@pytest.mark.parametrize("ids", [(), ("a",)])
def test_engines_with_and_without_a_key_do_not_mix(cache, ids):
    other = () if ids else ("a",)
    keep(opened(cache, *ids), 1)
    said = (
        f"file tier: the chunks in {cache} are encrypted, and the tier has no key_file; set key_file, or "
        "name another directory"
        if ids
        else f"file tier: the chunks in {cache} are not encrypted, and the tier has a key_file; name another "
        f"directory, or remove them with: kvferry cache clear {cache}"
    )
    with pytest.raises(ConfigError) as caught:
        opened(cache, *other)
    assert str(caught.value) == said
    DirectoryAdmin(cache).clear()
    assert keep(opened(cache, *other), 1) is PutOutcome.STORED
    with pytest.raises(ConfigError, match="encrypted, and the tier has"):
        opened(cache, *ids)


def test_the_marker_of_a_directory_says_whether_it_is_encrypted(cache, tmp_path):
    (tmp_path / "plain").mkdir()
    for path, ids, version in ((cache, ("a",), 2), (tmp_path / "plain", (), 1)):
        opened(path, *ids)
        marker = json.loads((path / "kvferry.json").read_text())
        assert marker == {"directory": version, "kvferry": "file tier"}


@pytest.mark.parametrize("ids", [(), ("a",)])
def test_of_two_engines_that_open_a_new_directory_at_once_one_is_refused(cache, monkeypatch, ids):
    def look(root, encrypted):
        check_directory(root, encrypted)
        # Another engine is faster after this first look.
        monkeypatch.setattr(tier_module, "check_directory", check_directory)
        opened(cache, *(() if ids else ("a",)))

    monkeypatch.setattr(tier_module, "check_directory", look)
    with pytest.raises(ConfigError, match="encrypted, and the tier has"):
        opened(cache, *ids)


def test_an_engine_does_not_go_on_in_a_directory_that_is_not_encrypted(cache, tmp_path):
    store = opened(cache, "a")
    keep(store, 1)
    plain = tmp_path / "plain"
    plain.mkdir()
    keep(opened(plain), 2)
    shutil.rmtree(cache)
    plain.rename(cache)
    before = total(cache)
    assert keep(store, 3) is PutOutcome.IO_ERROR
    assert total(cache) == before


def test_a_cleared_directory_stays_encrypted_for_the_engines_that_use_it(cache):
    store = opened(cache, "a")
    DirectoryAdmin(cache).clear()
    assert keep(store, 1) is PutOutcome.STORED
    with pytest.raises(ConfigError, match="the tier has no key_file"):
        opened(cache)


def test_an_encrypted_chunk_in_another_directory_is_a_miss_without_the_key(cache, stored, tmp_path, caplog):
    plain = tmp_path / "plain"
    plain.mkdir()
    store = opened(plain)
    file_of(plain, 1).parent.mkdir(parents=True)
    file_of(plain, 1).write_bytes(stored)
    assert fetch(store, 1, GROUP)[0] is GetOutcome.OTHER_KEY
    assert "it is encrypted with key 'a', and no key_file is set" in caplog.text


def test_operators_check_a_directory_without_the_key(cache, stored):
    admin = DirectoryAdmin(cache)
    [usage] = namespace_usage(admin)
    assert (usage.namespace, usage.chunks, usage.tokens) == (NAMESPACE.digest.hex(), 1, 64)
    assert verify_all(admin).bad == ()
    data = bytearray(stored)
    data[segment(data, 1).start] ^= 1
    file_of(cache, 1).write_bytes(data)
    [bad] = verify_all(admin, quarantine=True).bad
    assert bad.why == "encrypted segment 1 is damaged: its checksum differs"
    assert bad.moved
    assert fetch(opened(cache, "a"), 1, GROUP)[0] is GetOutcome.ABSENT


@pytest.mark.parametrize("ids", [(), ("a",)])
def test_only_an_encrypted_directory_may_be_writable_by_others(cache, caplog, ids):
    cache.chmod(0o770)
    opened(cache, *ids)
    told = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert len(told) == (not ids)


def test_the_settings_name_the_key_file(cache, tmp_path):
    settings = FileSettings(path=str(cache), capacity="64MiB", key_file=str(tmp_path / "keys"))
    for call in (settings.check_storage, lambda: settings.open(NAMESPACE, KeyTable(), [])):
        with pytest.raises(ConfigError, match=r"key_file .*keys: No such file"):
            call()
    write_keys(tmp_path / "keys", "a")
    settings.check_storage()
    keep(settings.open(NAMESPACE, KeyTable(), []), 1, GROUP)
    assert fetch(opened(cache, "a"), 1, GROUP) == (GetOutcome.HIT, True)
    with pytest.raises(ConfigError, match="the tier has no key_file"):
        FileSettings(path=str(cache)).check_storage()
