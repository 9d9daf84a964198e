"""`kvferry cache`, on real folders."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvferry.common.errors import ConfigError
from kvferry.common.units import format_bytes
from kvferry.keys import tenant_of
from kvferry.tiers import admin as survey
from kvferry.tiers.files.admin import DirectoryAdmin
from kvferry.tiers.files.ledger import read_ledger
from kvferry.tiers.format.chunk import ChunkGroup, ChunkSection
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tools.cli.main import main
from support.chunk_files import key
from support.stores import FILE_BYTES, NAMESPACE, OTHER, fetch, file_of, keep, open_store, total

pytestmark = pytest.mark.slow

KVFERRY = [sys.executable, "-c", "from kvferry.tools.cli.main import main; main()", "cache"]


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
    group = ChunkGroup("full", 16, (ChunkSection("kv", 1, 10),))
    keep(open_store(tmp_path, namespace=OTHER), 1, group)
    return tmp_path


def spoil(path):
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"spoiled")


def test_ls_shows_namespaces_by_the_facts_of_their_models(cache):
    used = time.time() - 100 * 86_400
    os.utime(file_of(cache, 1), (used, used))
    os.utime(file_of(cache, 2), (1e6, 1e6))  # a cold chunk, which nothing has used
    said = kvferry("ls", cache)
    assert f"{NAMESPACE.digest.hex()[:16]}  tests/small\n  dtype bfloat16, kv_dtype auto" in said
    assert "weights 0123abcd, chunks of 64 tokens\n" in said
    assert re.search(r"3 chunks, 192 tokens, 180 KiB; last used \d+ s ago", said)
    assert " days ago" in said
    assert "1 chunk, 16 tokens, 8 KiB" in said
    assert max(map(len, said.splitlines())) <= 80
    with pytest.MonkeyPatch.context() as narrow:
        narrow.setenv("COLUMNS", "44")
        assert max(map(len, kvferry("ls", cache).splitlines())) <= 44
    (first,) = [one for one in json.loads(kvferry("ls", cache, "--json")) if one["name"] == "tests/small"]
    assert first["facts"] == NAMESPACE.facts
    assert (first["chunks"], first["tokens"], first["total_bytes"]) == (3, 192, 3 * FILE_BYTES)
    assert first["oldest"] == pytest.approx(used, abs=1)


def test_ls_counts_the_tokens_of_a_prompt_once_although_each_group_stores_them(cache):
    window = ChunkGroup("window", 64, (ChunkSection("kv", 1, 10),))
    keep(open_store(cache), 3, window)
    (found,) = [one for one in survey.namespace_usage(DirectoryAdmin(cache)) if one.name == "tests/small"]
    assert (found.chunks, found.tokens) == (4, 192)


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


def test_stat_says_how_much_may_be_written(tmp_path):
    keep(open_store(tmp_path, capacity=1 << 26, write_per_day=24 * 4 * FILE_BYTES), 0)
    said = kvferry("stat", tmp_path)
    found = re.search(r"may be written +(.*) a day; (\d+)% of an hour's budget is left\n", said)
    assert found is not None
    assert found[1] == format_bytes(24 * 4 * FILE_BYTES)
    assert 75 <= int(found[2]) <= 80  # a chunk of four is written
    assert max(map(len, said.splitlines())) <= 80


def test_verify_names_what_is_bad_and_moves_it_only_when_told_to(cache):
    assert "4 chunks, 188 KiB: 0 bad" in kvferry("verify", cache)
    spoil(file_of(cache, 1))
    file_of(cache, 0).replace(file_of(cache, 2))
    said = kvferry("verify", cache, code=1)
    assert f"{file_of(cache, 1)}\n  unit 0 of section k is damaged" in said
    assert "3 chunks, 128 KiB: 2 bad" in said
    assert "expected the one of its name" in " ".join(said.split())
    assert file_of(cache, 1).exists()
    found = json.loads(kvferry("verify", cache, "--quarantine", "--json", code=1))
    assert [bad["moved"] for bad in found["bad"]] == [True, True]
    assert len(list((cache / "quarantine").iterdir())) == 2
    assert "1 chunk" in kvferry("verify", cache)


def of_other_version(path):
    """Have a file say that it is of a later format version."""
    with path.open("r+b") as file:
        file.seek(8)
        file.write(bytes([99]))


def test_verify_leaves_chunks_of_other_releases_to_them(cache):
    of_other_version(file_of(cache, 1))
    said = kvferry("verify", cache, "--quarantine")
    assert said.splitlines() == [
        "4 chunks, 188 KiB: 0 bad",
        "1 of other format versions; run the release that wrote them",
    ]
    assert file_of(cache, 1).exists()
    assert json.loads(kvferry("verify", cache, "--json"))["other_versions"] == 1
    spoil(file_of(cache, 2))
    assert "1 bad" in kvferry("verify", cache, "--quarantine", code=1)
    assert file_of(cache, 1).exists()


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "clear"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_command_of_another_user_is_refused_in_one_sentence(command, capfd):
    """Of a user who may enter the directory, but none of the folders in it."""
    with TemporaryDirectory() as folder:
        cache = Path(folder)
        store = open_store(cache, capacity=1 << 20)
        keep(store, 1)
        for path in (cache, cache / "kvferry.json"):
            path.chmod(0o755)
        for before in ("ls", "stat", "verify", "gc"):
            run(before, cache)  # imports what nobody else may read here
        run("stat", cache / "absent")
        before = total(cache)
        capfd.readouterr()
        child = os.fork()
        if not child:
            os.setegid(65534)
            os.seteuid(65534)
            os._exit(run(command, cache, *(["--yes"] if command == "clear" else [])))
        _, status = os.waitpid(child, 0)
        said, errors = capfd.readouterr()
        assert (os.waitstatus_to_exitcode(status), said) == (2, ""), errors
        assert re.fullmatch(
            rf"kvferry: file tier: cannot use {cache}: Permission denied \({cache}/[^ ]+\); see to its "
            r"owner, mode and mount\n",
            errors,
        )
        assert total(cache) == before


def run(*args) -> int:
    """Run a command in this process; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["kvferry", "cache", *map(str, args)])
        try:
            main()
        except SystemExit as ended:
            sys.stdout.flush()
            return ended.code or 0
    return 0


@pytest.mark.parametrize("act", [survey.cache_totals, DirectoryAdmin.collect, DirectoryAdmin.clear])
def test_a_directory_that_vanishes_meanwhile_is_told(cache, tmp_path_factory, act):
    operator = DirectoryAdmin(cache)
    cache.rename(tmp_path_factory.mktemp("elsewhere") / "cache")
    with pytest.raises(ConfigError, match=r"No such file or directory .*see to its owner, mode and mount"):
        act(operator)
    assert not cache.exists()
    cache.mkdir()


def test_gc_evicts_what_was_used_longest_ago(cache):
    os.utime(file_of(cache, 1), (0, 0))
    assert "0 files evicted" in kvferry("gc", cache)
    done = json.loads(kvferry("gc", cache, "--capacity", "150000B", "--json"))
    assert done["evicted"] == 1
    assert done["evicted_bytes"] == FILE_BYTES
    assert not file_of(cache, 1).exists()
    assert read_ledger(cache) == (1 << 20, total(cache))


def test_gc_of_a_lost_ledger_asks_for_a_capacity_and_leaves_engines_theirs(cache):
    store = open_store(cache)
    (cache / "ledger").write_bytes(b"lost")
    assert "give one with --capacity" in kvferry("gc", cache, code=2)
    assert keep(store, 7) is PutOutcome.STORED
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
    kvferry("gc", cache, "--capacity", "100000B")
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
        DirectoryAdmin(cache).clear()
    monkeypatch.undo()
    assert len(list(cache.rglob("*.kv"))) == 2
    assert read_ledger(cache) == (1 << 20, total(cache))
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
    assert fetch(store, 0)[0] is GetOutcome.ABSENT
    for number in range(30):
        assert keep(store, number) is PutOutcome.STORED
        assert total(cache) <= 1 << 20
    assert read_ledger(cache) == (1 << 20, total(cache))
    assert "chunks" in kvferry("ls", cache)


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "clear"])
def test_a_path_that_is_no_cache_is_refused_in_one_sentence(tmp_path, command):
    said = kvferry(command, tmp_path, code=2)
    assert said.startswith(f"kvferry: {tmp_path} is not a cache of kvferry: it has no kvferry.json; name ")
    assert said.count("\n") == 1
    assert "does not exist" in kvferry(command, tmp_path / "absent", code=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_tenant_of_a_salt_is_printed_and_the_salt_is_not(end):
    said = kvferry("tenant", answer=f"a secret{end}")
    assert said == f"{tenant_of('a secret', None).hex()}\n"


def test_without_a_salt_no_tenant_is_printed():
    assert "standard input is empty; give a cache salt" in kvferry("tenant", answer="\n", code=2)
