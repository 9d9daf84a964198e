"""Whose weights they are: content counts, and what is remembered is only ever a shortcut."""

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace

import pytest
from blake3 import blake3

from kvferry.cache import weights
from kvferry.cache.weights import digest_file_content, file_key, log_progress, weights_of
from kvferry.common.errors import ConfigError


def later() -> float:
    """When files of this test have not been touched for a while."""
    return time.time() + 60


READ: list[str] = []
"""Names of the files that were read in full."""


def noted_digest(file, progress):
    READ.append(Path(file.name).name)
    return digest_file_content(file, progress)


def digest_of_files(files, memory=None, now=later, digest=noted_digest, **options):
    return weights.digest_of_files(files, memory, now, digest, **options)


@pytest.fixture
def memory(tmp_path):
    return tmp_path / "cache" / "weights.json"


@pytest.fixture
def file(tmp_path):
    def make(name: str, content: bytes):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return make


@pytest.fixture
def reads():
    READ.clear()
    return READ


def test_the_same_content_under_another_name_is_the_same(file, memory):
    assert digest_of_files([file("a", b"weights")], memory) == digest_of_files(
        [file("b", b"weights")], memory
    )


def test_content_of_the_same_length_that_differs_is_another(file, memory):
    assert digest_of_files([file("a", b"weights")], memory) != digest_of_files(
        [file("b", b"Weights")], memory
    )


def test_digest_depends_on_the_boundaries_between_files(file, memory):
    one = digest_of_files([file("a", b"we"), file("b", b"ights")], memory)
    assert one != digest_of_files([file("c", b"weig"), file("d", b"hts")], memory)
    assert one != digest_of_files([file("e", b"weights")], memory)


def test_an_empty_file_is_a_file(file, memory):
    assert digest_of_files([file("a", b"")], memory) != digest_of_files([], memory)


def test_a_file_that_did_not_change_is_read_once(file, memory, reads):
    path = file("a", b"weights")
    first = digest_of_files([path], memory)
    assert digest_of_files([path], memory) == first
    assert reads == ["a"]


def test_a_file_that_changed_in_place_is_read_again(file, memory, reads):
    path = file("a", b"weights")
    first = digest_of_files([path], memory)
    path.write_bytes(b"Weights")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert digest_of_files([path], memory) != first
    assert reads == ["a", "a"]


def test_new_files_are_read_and_known_ones_are_not(file, memory, reads):
    digest_of_files([file("a", b"one")], memory)
    digest_of_files([file("b", b"two"), file("c", b"three")], memory)
    assert reads == ["a", "b", "c"]


def test_a_cache_directory_that_cannot_be_written_costs_only_time(file, tmp_path, reads):
    path, blocked = file("a", b"weights"), file("in the way", b"")
    first = digest_of_files([path], blocked / "weights.json")
    assert digest_of_files([path], blocked / "weights.json") == first
    assert reads == ["a", "a"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b'"text"', b"{}", b"[" * 100_000, b'{"a": 5}', b'{"a": null}'],
    ids=lambda content: repr(content[:10]),
)
def test_a_spoiled_memory_is_no_memory(file, memory, content, reads):
    path = file("a", b"weights")
    wanted = digest_of_files([path], memory)
    memory.write_bytes(content)
    assert digest_of_files([path], memory) == wanted
    assert reads == ["a", "a"]
    assert digest_of_files([path], memory) == wanted
    assert reads == ["a", "a"], "and it is mended"


def test_a_memory_with_any_bit_flipped_is_no_memory(file, memory, reads):
    path = file("a", b"weights")
    wanted = digest_of_files([path], memory)
    good = memory.read_bytes()
    for at in range(len(good)):
        memory.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert digest_of_files([path], memory) == wanted


def test_a_change_that_keeps_size_and_time_of_modification_is_seen(file, memory):
    path = file("a", b"weights")
    first, stat = digest_of_files([path], memory), path.stat()
    path.write_bytes(b"Weights")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert digest_of_files([path], memory) != first


def test_another_file_of_the_same_size_and_times_is_another(file, memory):
    first = digest_of_files([file("a", b"weights")], memory)
    assert digest_of_files([file("b", b"Weights")], memory) != first


@pytest.mark.parametrize("old", ["neither", "time of modification"])
def test_digest_of_a_file_that_has_just_changed_is_not_cached(file, memory, reads, old):
    path = file("a", b"weights")
    if old != "neither":
        os.utime(path, (1000, 1000))  # as copies that keep times set it
    changed = max(path.stat().st_mtime, path.stat().st_ctime)
    digest_of_files([path], memory, now=lambda: changed + 1.9)
    digest_of_files([path], memory, now=lambda: changed + 2.1)
    digest_of_files([path], memory, now=lambda: changed + 2.1)
    assert reads == ["a", "a"]


def test_a_file_that_changes_while_it_is_read_is_refused(file, memory):
    path = file("a", b"weights")

    def growing(opened, progress):
        found = digest_file_content(opened, progress)
        path.write_bytes(b"weights and more")
        return found

    with pytest.raises(ConfigError, match="weights a changed while they were read; wait until"):
        digest_of_files([path], memory, digest=growing)
    assert not memory.exists()


def test_a_file_larger_than_the_buffer_is_digested_whole(file, memory):
    content = os.urandom((9 << 20) + 1)
    expected = hashlib.blake2b(blake3(content).digest(), digest_size=16).hexdigest()
    assert digest_of_files([file("a", content)], memory) == expected


def test_the_digest_is_fixed_for_ever(file, memory):
    assert (
        digest_of_files([file("a", b"one"), file("b", b"two")], memory) == "fb8dd05dfdb03be6dc5d95ef2777d677"
    )


def test_progress_is_logged_every_eight_gib(caplog):
    progress = log_progress([Path("a"), Path("b")])
    with caplog.at_level(logging.INFO, "kvferry"):
        progress((8 << 30) - 1)
        assert not caplog.messages
        progress(1)
        progress(1)
    assert caplog.messages == ["hashing 2 weight files, once: 8.6 GB so far"]


def test_digests_that_others_add_meanwhile_are_kept(file, memory):
    one, other = file("a", b"one"), file("b", b"two")

    def slow(opened, progress):
        digest_of_files([other], memory)
        return digest_file_content(opened, progress)

    digest_of_files([one], memory, digest=slow)
    assert len(json.loads(memory.read_text())["files"]) == 2


def test_the_oldest_digests_are_forgotten(file, memory, reads):
    paths = [file(name, name.encode()) for name in "abc"]
    for path in paths:
        digest_of_files([path], memory, max_digests=2)
    digest_of_files(paths[1:], memory)
    assert reads == ["a", "b", "c"]
    digest_of_files(paths[:1], memory)
    assert reads == ["a", "b", "c", "a"]


def test_many_threads_at_once_leave_one_whole_memory(file, memory):
    paths = [file(f"file {number}", os.urandom(2000)) for number in range(40)]
    with ThreadPool(8) as pool:
        found = pool.map(lambda path: digest_of_files([path], memory), paths)
    assert found == [digest_of_files([path], memory) for path in paths]
    READ.clear()
    digest_of_files(paths, memory)
    assert len(READ) < len(paths), "the memory is whole, though it may lack what another writer added"
    assert [path.name for path in memory.parent.iterdir()] == ["weights.json"]


def test_many_processes_at_once_leave_one_whole_memory(file, memory):
    paths = [file(f"file {number}", os.urandom(2000)) for number in range(10)]
    program = (
        "import sys, time; from pathlib import Path; from kvferry.cache.weights import digest_of_files;"
        "later = lambda: time.time() + 60;"
        "[print(digest_of_files([Path(each)], Path(sys.argv[1]), later)) for each in sys.argv[2:]]"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, memory, *paths], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = {process.communicate()[0] for process in running}
    assert said == {"".join(digest_of_files([path], memory) + "\n" for path in paths)}
    READ.clear()
    digest_of_files(paths, memory)
    assert len(READ) < len(paths), "the memory is whole, though it may lack what another writer added"
    assert [path.name for path in memory.parent.iterdir()] == ["weights.json"]


def test_temporary_file_is_removed_if_the_digest_file_cannot_be_replaced(file, memory):
    memory.mkdir(parents=True)
    digest_of_files([file("a", b"weights")], memory)
    assert list(memory.parent.iterdir()) == [memory]


def test_all_weight_files_of_a_checkpoint_count_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    model = tmp_path / "model"
    model.mkdir()
    assert weights_of(model) is None
    found = set()
    for name in ("1.safetensors", "2.safetensors", "3.bin", "4.pt", "5.pth", "6.gguf"):
        (model / name).write_bytes(b"weights")
        found.add(weights_of(model))
    assert len(found) == 6
    (model / "config.json").write_text("{}")
    assert weights_of(model) in found
    (model / "1.safetensors").write_bytes(b"Weights")
    assert weights_of(model) not in found


def test_a_checkpoint_of_one_file_is_that_file(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = file("model.gguf", b"weights")
    assert weights_of(path) == digest_of_files([path])


def test_links_are_followed_to_the_content(file, tmp_path, monkeypatch):
    """As the hub's cache has them: names that link to files named by their content."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    model = tmp_path / "model"
    model.mkdir()
    path = file("blob", b"weights")
    (model / "model.safetensors").symlink_to(path)
    assert weights_of(model) == digest_of_files([path])
    path.unlink()
    with pytest.raises(ConfigError, match=r"weights model.safetensors cannot be read"):
        weights_of(model)


def test_a_file_that_is_not_there_is_a_setting_to_change(tmp_path, memory):
    with pytest.raises(ConfigError, match=r"weights gone.safetensors cannot be read: No such file"):
        digest_of_files([tmp_path / "gone.safetensors"], memory)


def test_a_directory_in_place_of_a_file_is_a_setting_to_change(tmp_path, memory):
    with pytest.raises(ConfigError, match="cannot be read"):
        digest_of_files([tmp_path], memory)


def test_the_memory_is_in_the_users_cache_directory(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    digest_of_files([file("a", b"weights")])
    assert (tmp_path / "xdg" / "kvferry" / "weights.json").exists()
    left = [path.name for path in (tmp_path / "xdg" / "kvferry").iterdir()]
    assert left == ["weights.json"], "nothing temporary is left"


@pytest.mark.parametrize("name", ["st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns"])
def test_files_that_differ_in_one_of_these_alone_are_not_one(file, name):
    """Every change sets the time of change, but not every file system keeps it."""
    stat = file("a", b"weights").stat()
    one = SimpleNamespace(**{each: getattr(stat, each) for each in dir(stat) if each.startswith("st_")})
    other = SimpleNamespace(**{**vars(one), name: getattr(one, name) + 1})
    assert file_key(one) != file_key(other)


def test_concurrent_writers_use_different_temporary_files(file, memory, monkeypatch, reads):
    path, others, dump = file("a", b"one"), [file(name, b"other") for name in "bcd"], json.dump

    def interrupted(*args):
        monkeypatch.setattr(json, "dump", dump)
        digest_of_files(others, memory)
        dump(*args)

    monkeypatch.setattr(json, "dump", interrupted)
    digest_of_files([path], memory)
    reads.clear()
    digest_of_files([path], memory)
    assert not reads
