"""`kvferry cache`, on real folders."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from kvferry.tiers.directory import Directory
from kvferry.tiers.format import Group, Section
from kvferry.tiers.ledger import read_ledger
from kvferry.tiers.outcome import Get, Put
from support.chunk_files import key
from support.stores import FILE_BYTES, NAMESPACE, OTHER, fetch, file_of, keep, open_store, total

KVFERRY = [sys.executable, "-c", "from kvferry.cli.main import main; main()", "cache"]


def kvferry(*args, code=0, answer=""):
    done = subprocess.run(
        [*KVFERRY, *map(str, args)], capture_output=True, text=True, check=False, input=answer
    )
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout if code != 2 else done.stderr


@pytest.fixture
def cache(tmp_path):
    store = open_store(tmp_path, capacity=1 << 20)
    for number in range(3):
        keep(store, number)
    group = Group("full", 16, (Section("kv", 1, 10),))
    keep(open_store(tmp_path, namespace=OTHER), 1, group)
    return tmp_path


def spoil(path):
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"spoiled")


def test_ls_shows_namespaces_by_the_facts_of_their_models(cache):
    os.utime(file_of(cache, 1), (0, 0))
    said = kvferry("ls", cache)
    assert f"{NAMESPACE.digest.hex()[:16]}  tests/small\n  dtype bfloat16, kv_dtype auto" in said
    assert "weights 0123abcd, chunks of 64 tokens\n" in said
    assert re.search(r"3 chunks, 192 tokens, 180 KiB; last used \d+ s ago", said)
    assert " days ago" in said
    assert "1 chunks, 16 tokens, 8 KiB" in said
    assert max(map(len, said.splitlines())) <= 80
    with pytest.MonkeyPatch.context() as narrow:
        narrow.setenv("COLUMNS", "44")
        assert max(map(len, kvferry("ls", cache).splitlines())) <= 44
    (first,) = [one for one in json.loads(kvferry("ls", cache, "--json")) if one["name"] == "tests/small"]
    assert first["facts"] == NAMESPACE.facts
    assert (first["chunks"], first["tokens"], first["total_bytes"]) == (3, 192, 3 * FILE_BYTES)
    assert first["oldest"] == 0


def test_ls_believes_no_note_but_that_of_the_namespace(cache):
    note = cache / NAMESPACE.digest.hex() / "namespace.json"
    note.write_text(OTHER.note)
    said = kvferry("ls", cache)
    assert f"{NAMESPACE.digest.hex()[:16]}  no model named\n  3 chunks" in said
    note.write_text(replace(NAMESPACE, name="evil\x1b[2J\udc80").note)
    assert f"{NAMESPACE.digest.hex()[:16]}  evil?[2J?\n" in kvferry("ls", cache)


def test_ls_counts_chunks_whose_header_is_damaged(cache):
    file_of(cache, 0).write_bytes(b"no chunk")
    assert "1 of them cannot be read" in kvferry("ls", cache)


def test_stat_says_what_there_is_and_may_be(cache):
    found = json.loads(kvferry("stat", cache, "--json"))
    assert found["total_bytes"] == found["charged"] == total(cache)
    assert (found["capacity"], found["chunks"], found["namespaces"]) == (1 << 20, 4, 2)
    said = kvferry("stat", cache)
    assert "capacity       1 MiB" in said
    assert max(map(len, said.splitlines())) <= 80
    (cache / "ledger").write_bytes(b"")
    assert "unknown: the ledger is damaged" in kvferry("stat", cache)


def test_verify_names_what_is_bad_and_moves_it_only_when_told_to(cache):
    assert "4 chunks, 188 KiB: 0 bad" in kvferry("verify", cache)
    spoil(file_of(cache, 1))
    file_of(cache, 0).replace(file_of(cache, 2))
    said = kvferry("verify", cache, code=1)
    assert f"{file_of(cache, 1)}\n  unit 0 of section k is not what was written" in said
    assert "3 chunks, 128 KiB: 2 bad" in said
    assert "under another name" in said
    assert file_of(cache, 1).exists()
    found = json.loads(kvferry("verify", cache, "--quarantine", "--json", code=1))
    assert [bad["moved"] for bad in found["bad"]] == [True, True]
    assert len(list((cache / "quarantine").iterdir())) == 2
    assert "1 chunks" in kvferry("verify", cache)


def test_gc_evicts_what_was_used_longest_ago(cache):
    os.utime(file_of(cache, 1), (0, 0))
    assert "0 files evicted" in kvferry("gc", cache)
    done = json.loads(kvferry("gc", cache, "--capacity", 150_000, "--json"))
    assert done["evicted"] == 1
    assert done["evicted_bytes"] == FILE_BYTES
    assert not file_of(cache, 1).exists()
    assert read_ledger(cache) == (1 << 20, total(cache))


def test_gc_of_a_lost_ledger_asks_for_a_capacity_and_leaves_engines_theirs(cache):
    store = open_store(cache)
    (cache / "ledger").write_bytes(b"lost")
    assert "give a capacity" in kvferry("gc", cache, code=2)
    assert keep(store, 7) is Put.STORED
    assert read_ledger(cache) == (1 << 20, total(cache))


def test_clear_removes_what_is_kvferrys_and_nothing_else(cache):
    spoil(file_of(cache, 1))
    kvferry("verify", cache, "--quarantine", code=1)
    (cache / "notes.txt").write_text("mine")
    bucket = file_of(cache, 0).parent
    mine = [bucket / "mine.kv", bucket / (key(0).hex() + ".kv.orig"), cache / "ab" / "mine"]
    (cache / "ab").mkdir()
    for path in mine:
        path.write_text("mine")
    (bucket / ("ab" * 20 + ".kv")).symlink_to(cache / "notes.txt")
    assert "files removed" in kvferry("clear", cache, "--yes")
    left = {path for path in cache.rglob("*") if not path.is_dir()}
    assert left == {cache / "notes.txt", bucket / ("ab" * 20 + ".kv"), *mine}


def test_clear_leaves_an_empty_folder(cache):
    kvferry("gc", cache, "--capacity", 100_000)
    kvferry("clear", cache, "--yes")
    assert not list(cache.iterdir())


def test_a_clear_that_is_interrupted_can_be_repeated(cache, monkeypatch):
    unlink, left = os.unlink, [3]

    def interrupted(path):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        unlink(path)

    monkeypatch.setattr(os, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Directory(cache).clear()
    monkeypatch.undo()
    assert len(list(cache.rglob("*.kv"))) == 2
    kvferry("clear", cache, "--yes")
    assert not list(cache.iterdir())


def test_clear_asks(cache):
    assert "Nothing was removed." in kvferry("clear", cache, answer="n\n")
    assert "pass --yes" in kvferry("clear", cache, code=2)
    assert file_of(cache, 0).exists()
    kvferry("clear", cache, answer="y\n")
    assert not file_of(cache, 0).exists()


def test_an_engine_goes_on_after_a_clear_within_its_capacity(cache):
    store = open_store(cache)
    kvferry("clear", cache, "--yes")
    assert fetch(store, 0)[0] is Get.ABSENT
    for number in range(30):
        assert keep(store, number) is Put.STORED
        assert total(cache) <= 1 << 20
    assert read_ledger(cache) == (1 << 20, total(cache))
    assert "chunks" in kvferry("ls", cache)


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "clear"])
def test_a_path_that_is_no_cache_is_refused_in_one_sentence(tmp_path, command):
    said = kvferry(command, tmp_path, code=2)
    assert said.startswith(f"kvferry: {tmp_path} is no cache of kvferry: it has no kvferry.json; name the ")
    assert said.count("\n") == 1
    assert "does not exist" in kvferry(command, tmp_path / "absent", code=2)
    assert not list(tmp_path.iterdir())
