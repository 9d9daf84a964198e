"""`kvferry cache`, on URLs."""

from __future__ import annotations

import io
import json

import pytest

from kvferry.tiers.format.chunk import ChunkGroup, ChunkSection
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.objects.client import BucketClient
from kvferry.tiers.paths import chunk_name
from kvferry.tools.cli.main import main
from support.chunk_files import key
from support.object_server import Server
from support.objects import get, open_objects, put
from support.stores import FILE_BYTES, NAMESPACE, OTHER

NOTES_BYTES = len(NAMESPACE.note) + len(OTHER.note)
SMALL_BYTES = 8 << 10


@pytest.fixture
def kvferry(place, monkeypatch, capsys):
    """Runs a command on the cache, with what the client needs in the environment; gives what it says."""
    url, server = place

    def run(command, *args, code=0, url=url, environment=server.environment if server else {}):
        with monkeypatch.context() as patch:
            patch.setattr("sys.argv", ["kvferry", "cache", command, url, *map(str, args)])
            patch.setattr("sys.stdin", io.StringIO())
            for variable, value in environment.items():
                patch.setenv(variable, value)
            with pytest.raises(SystemExit) as ended:
                main()
        said, errors = capsys.readouterr()
        assert (ended.value.code or 0) == code, errors + said
        return errors if code == 2 else said

    return run


@pytest.fixture
def store(place):
    """Three chunks of one model, which it has, and one of another."""
    store = open_objects(*place)
    for number in range(3):
        put(store, number)
    put(open_objects(*place, namespace=OTHER), 1, ChunkGroup("full", 16, (ChunkSection("kv", 1, 10),)))
    return store


def name(number: int) -> str:
    return chunk_name(NAMESPACE.digest, key(number))


def names(bucket: BucketClient) -> set[str]:
    return {one.path for page in bucket.list() for one in page}


def spoil(bucket: BucketClient, number: int) -> None:
    data = bytearray(b"".join(bucket.get(name(number)).pieces))
    data[5000] ^= 1
    bucket.put(name(number), [data])


def test_ls_shows_namespaces_with_when_they_were_stored(kvferry, store):
    said = kvferry("ls")
    assert f"{NAMESPACE.digest.hex()[:16]}  tests/small" in said
    assert "3 chunks, 192 tokens, 180 KiB; stored " in said
    assert "1 chunk, 16 tokens, 8 KiB" in said
    assert max(map(len, said.splitlines())) <= 80
    found = {one["namespace"]: one for one in json.loads(kvferry("ls", "--json"))}
    first = found[NAMESPACE.digest.hex()]
    assert first["facts"] == NAMESPACE.facts
    assert (first["chunks"], first["tokens"], first["total_bytes"]) == (3, 192, 3 * FILE_BYTES)


def test_stat_says_what_there_is(kvferry, store):
    found = json.loads(kvferry("stat", "--json"))
    assert found["total_bytes"] == 3 * FILE_BYTES + SMALL_BYTES + NOTES_BYTES
    assert (found["capacity"], found["free"], found["chunks"], found["namespaces"]) == (None, None, 4, 2)
    said = kvferry("stat")
    assert "capacity       none: see to the bucket's lifecycle rules" in said
    assert "free on disk" not in said


def test_verify_names_what_is_bad_and_moves_it_only_when_told_to(kvferry, store, bucket, place):
    assert "4 chunks, 188 KiB: 0 bad" in kvferry("verify")
    spoil(bucket, 1)
    bucket.put(name(0), [b"".join(bucket.get(name(2)).pieces)])
    bucket.put(name(2), [b"no chunk"])
    said = kvferry("verify", code=1)
    assert f"{place[0]}/{name(1)}\n  unit 0 of section k is damaged" in said
    assert "expected the one of its name" in " ".join(said.split())
    assert ": 3 bad" in said
    assert name(1) in names(bucket)
    found = json.loads(kvferry("verify", "--quarantine", "--json", code=1))
    assert [bad["moved"] for bad in found["bad"]] == [True] * 3
    assert sum(each.startswith("quarantine/") for each in names(bucket)) == 3
    assert "1 chunk" in kvferry("verify")
    assert "3, " in next(line for line in kvferry("stat").splitlines() if line.startswith("quarantined"))


def test_gc_removes_what_was_stored_longest_ago(kvferry, store, bucket):
    total = 3 * FILE_BYTES + SMALL_BYTES + NOTES_BYTES
    assert "0 files evicted" in kvferry("gc", "--capacity", "1GiB")
    bucket.move(name(1), "quarantine/" + "-".join((NAMESPACE.digest.hex(), key(1).hex(), "0" * 16)) + ".bad")
    stored = {
        one.path: one.stored_ns for page in bucket.list() for one in page if "namespace" not in one.path
    }
    done = json.loads(kvferry("gc", "--capacity", f"{total - 1}B", "--json"))
    assert done["evicted"] == 1
    gone = stored.keys() - names(bucket)
    assert len(gone) == 1
    assert stored[gone.pop()] == min(stored.values())
    done = json.loads(kvferry("gc", "--capacity", "0", "--json"))
    assert done["evicted"] == 3
    assert done["charged"] == NOTES_BYTES
    assert "has no capacity of its own; give one with --capacity" in kvferry("gc", code=2)


def test_clear_removes_what_is_kvferrys_and_nothing_else(kvferry, store, bucket):
    space = NAMESPACE.digest.hex()
    mine = {
        "notes.txt",
        f"{space}/00/mine.kv",
        f"{space}/mine",
        "quarantine/mine",
        f"{space}/{key(1).hex()}.kv",
    }
    for each in mine:
        bucket.put(each, [b"mine"])
    spoil(bucket, 1)
    assert get(store, 1) is GetOutcome.CORRUPT
    assert "pass --yes" in kvferry("clear", code=2)
    assert name(0) in names(bucket)
    assert "6 files removed" in kvferry("clear", "--yes")
    assert names(bucket) == mine
    assert "is not a cache of kvferry: no object there has the name of a chunk" in kvferry("ls", code=2)


def test_an_engine_goes_on_after_a_clear(kvferry, store):
    kvferry("clear", "--yes")
    assert get(store, 0) is GetOutcome.ABSENT
    assert put(store, 0) is PutOutcome.STORED
    store.refresh()
    assert "1 chunk, 64 tokens" in kvferry("ls")


def test_options_of_the_client_can_be_given(kvferry, store, place):
    server = place[1]
    if server is None:
        assert "no option 'region'; known are none" in kvferry("ls", "-o", "region=here", code=2)
        return
    environment = server.environment
    region, endpoint = environment.pop("AWS_REGION"), environment.pop("AWS_ENDPOINT")
    options = ["-o", f"region={region}", "--option", f"endpoint={endpoint}"]
    assert "tests/small" in kvferry("ls", *options, environment=environment)
    assert "--option region: give each name once" in kvferry("ls", "-o", "region", code=2)


def test_options_are_not_for_paths(kvferry, tmp_path):
    assert "is a path" in kvferry("ls", "-o", "region=here", url=str(tmp_path), code=2)


@pytest.mark.parametrize("size", ["ten", "10XB", "-1", "1e9"])
def test_invalid_size_is_refused(kvferry, store, size):
    assert "; write a number of bytes, or one with KiB, MiB, GiB, TiB or PiB" in kvferry(
        "gc", "--capacity=" + size, code=2
    )


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "clear"])
def test_unreachable_storage_is_reported_in_one_sentence(kvferry, command):
    closed = Server(1)
    said = kvferry(command, url="s3://bucket/path", environment=closed.environment, code=2)
    assert said.startswith(
        "kvferry: object tier: s3://bucket/path: it cannot be reached (Connection refused); see"
    )
    assert said.count("\n") == 1
