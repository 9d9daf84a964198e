"""Whose weights they are: content counts, and what is remembered is only ever a shortcut."""

import json
import os

import pytest

from kvferry.engines.vllm import identity
from kvferry.engines.vllm.identity import digest_of_files
from kvferry.errors import ConfigError


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
def reads(monkeypatch):
    """Names of the files that are read in full."""
    read, digest = [], identity._digest

    def looking(path):
        read.append(path.name)
        return digest(path)

    monkeypatch.setattr(identity, "_digest", looking)
    return read


def test_the_same_content_under_another_name_is_the_same(file, memory):
    assert digest_of_files([file("a", b"weights")], memory) == digest_of_files(
        [file("b", b"weights")], memory
    )


def test_content_of_the_same_length_that_differs_is_another(file, memory):
    assert digest_of_files([file("a", b"weights")], memory) != digest_of_files(
        [file("b", b"Weights")], memory
    )


def test_where_one_file_ends_and_the_next_begins_counts(file, memory):
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


def test_only_new_files_are_read(file, memory, reads):
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


@pytest.mark.parametrize(
    "value", ["", "zz" * 32, "ab" * 31, "ab" * 33, 5, None, ["ab" * 32], " " * 64, "é" * 64]
)
def test_a_remembered_digest_that_is_none_is_not_used(file, memory, value):
    path = file("a", b"weights")
    wanted = digest_of_files([path], memory)
    known = json.loads(memory.read_text())
    memory.write_text(json.dumps(dict.fromkeys(known, value)))
    assert digest_of_files([path], memory) == wanted


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
