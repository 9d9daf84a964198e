from __future__ import annotations

import gzip
import io
import os
import threading
from types import SimpleNamespace

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.trace.base import TraceFile

TEXT = b"\n first\n\nsecond\r\nlast"
LINES = [(2, b" first\n"), (4, b"second\r\n"), (5, b"last")]


@pytest.fixture
def stdin(monkeypatch):
    def replace(content: bytes) -> None:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))

    return replace


def test_lines_that_are_not_blank_come_with_their_numbers(tmp_path):
    (tmp_path / "trace").write_bytes(TEXT)
    file = TraceFile(tmp_path / "trace")
    assert file.first_line() == LINES[0]
    assert list(file.lines()) == LINES
    assert [number for number, _ in file.all_lines()] == [1, 2, 3, 4, 5]


def test_a_file_can_be_read_again_and_counts_its_bytes_anew(tmp_path):
    (tmp_path / "trace").write_bytes(TEXT)
    file = TraceFile(tmp_path / "trace")
    for _ in range(2):
        assert list(file.lines()) == LINES
        assert file.read_bytes == file.size_bytes == len(TEXT)


def test_gzip_is_decompressed_whatever_the_name_and_counted_compressed(tmp_path):
    packed = gzip.compress(TEXT)
    (tmp_path / "trace").write_bytes(packed)
    file = TraceFile(tmp_path / "trace")
    assert file.first_line() == LINES[0]
    assert list(file.lines()) == LINES
    assert file.read_bytes == file.size_bytes == len(packed)
    assert file.open_seekable() is None


def test_plain_file_is_seekable_and_standard_input_is_not(tmp_path, stdin):
    (tmp_path / "trace").write_bytes(TEXT)
    stream = TraceFile(tmp_path / "trace").open_seekable()
    with stream:
        assert stream.seek(10) == 10
    stdin(TEXT)
    assert TraceFile("-").open_seekable() is None


@pytest.mark.parametrize("content", [TEXT, gzip.compress(TEXT)], ids=["plain", "gzip"])
def test_standard_input_is_read_once_from_its_beginning(stdin, content):
    stdin(content)
    file = TraceFile("-")
    assert (file.name, file.size_bytes) == ("standard input", None)
    assert file.first_line() == file.first_line() == LINES[0]
    assert [number for number, _ in file.all_lines()] == [1, 2, 3, 4, 5]
    assert file.read_bytes == len(content)
    with pytest.raises(ConfigError, match=r"^standard input can be read only once; save it to a file"):
        file.lines()


def test_a_named_pipe_is_read_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(TEXT,))
    writer.start()
    file = TraceFile(tmp_path / "pipe")
    assert file.first_line() == LINES[0]
    assert file.open_seekable() is None
    assert list(file.lines()) == LINES
    writer.join()
    with pytest.raises(ConfigError, match=r"^pipe can be read only once"):
        file.lines()


def test_a_name_is_safe_to_print(tmp_path):
    (tmp_path / "a\x1b[31m").write_bytes(TEXT)
    assert TraceFile(tmp_path / "a\x1b[31m").name == "a?[31m"


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^missing cannot be read: No such file or directory; give"):
        TraceFile(tmp_path / "missing")
    with pytest.raises(ConfigError, match="is a directory; give the path of a trace file"):
        TraceFile(tmp_path)
    (tmp_path / "blank").write_bytes(b"\n \n")
    with pytest.raises(ConfigError, match=r"^blank is empty; give a trace with at least one request"):
        TraceFile(tmp_path / "blank").first_line()


@pytest.mark.parametrize("harm", [lambda packed: packed[:-9], lambda packed: packed[:12] + b"\xff" * 20])
def test_a_damaged_compressed_file_is_refused(tmp_path, harm):
    (tmp_path / "trace.gz").write_bytes(harm(gzip.compress(TEXT * 1000)))
    with pytest.raises(ConfigError, match=r"^trace.gz cannot be read: .*; give a complete and readable file"):
        list(TraceFile(tmp_path / "trace.gz").lines())


def test_a_file_without_lines_does_not_fill_the_memory(tmp_path):
    (tmp_path / "image").touch()
    os.truncate(tmp_path / "image", 64 << 20)
    with pytest.raises(ConfigError, match=r"^image, line 1: the line has 64 MiB or more; "):
        TraceFile(tmp_path / "image").first_line()
