"""The file of a recording: one header, one engine at a time, and whole lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from kvferry.common.errors import ConfigError
from kvferry.observe.recorder import MOST_FILES, open_recording

HEADER = {"kvferry_trace": 1, "unit_tokens": 16, "model": "tiny\n"}
OTHER = {**HEADER, "unit_tokens": 32}


class Engines:
    """Engines with the same setting, and their files."""

    def __init__(self, path: Path) -> None:
        self.path, self._files = path, list[FileIO]()

    def start(self, header: dict[str, Any] = HEADER, index: int = 0) -> str:
        """The name of the file that an engine opens."""
        name, file = open_recording(str(self.path), header, index)
        self._files.append(file)
        return Path(name).name

    def write(self, line: bytes) -> None:
        """Write to the file opened last."""
        self._files[-1].write(line)

    def stop(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()

    def read(self, name: str = "trace.jsonl", starts: int = 2) -> list[bytes]:
        """Lines of requests; there are as many headers as engines that started, all alike."""
        header, *lines = (self.path.parent / name).read_bytes().splitlines(keepends=True)
        assert json.loads(header) in (HEADER, OTHER)
        assert lines.count(header) == starts - 1
        return [line for line in lines if line != header]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    found = Engines(tmp_path / "trace.jsonl")
    yield found
    found.stop()


def test_a_new_file_begins_with_the_header_and_is_the_owners_alone(engines: Engines) -> None:
    before = os.umask(0)
    try:
        assert engines.start() == "trace.jsonl"
    finally:
        os.umask(before)
    engines.write(b"a\n")
    assert engines.read(starts=1) == [b"a\n"]
    assert engines.path.stat().st_mode & 0o777 == 0o600


def test_an_engine_that_starts_again_goes_on_with_its_file(engines: Engines) -> None:
    for line in (b"a\n", b"b\n"):
        assert engines.start() == "trace.jsonl"
        engines.write(line)
        engines.stop()
    assert engines.read() == [b"a\n", b"b\n"]


@pytest.mark.parametrize("there", [b"notes\n", b"no line", json.dumps(HEADER).encode()])
def test_a_file_of_something_else_is_left_alone(engines: Engines, there: bytes) -> None:
    engines.path.write_bytes(there)
    for _ in range(2):
        assert engines.start() == "trace-2.jsonl"
        engines.stop()
    assert engines.path.read_bytes() == there


def test_an_engine_with_another_header_takes_another_file(engines: Engines) -> None:
    for header, name in ((HEADER, "trace.jsonl"), (OTHER, "trace-2.jsonl")) * 2:
        assert engines.start(header) == name
        engines.write(b"a\n")
        engines.stop()
    assert engines.read() == engines.read("trace-2.jsonl") == [b"a\n"] * 2


def test_engines_with_the_same_setting_take_a_file_each(engines: Engines) -> None:
    names = [engines.start(index=index) for index in (0, 0, 1, 0, 1)]
    assert names == [
        "trace.jsonl", "trace-2.jsonl", "trace-dp1.jsonl", "trace-3.jsonl", "trace-dp1-2.jsonl",
    ]  # fmt: skip


def test_the_file_of_another_process_is_left_alone(engines: Engines) -> None:
    program = f"""
from kvferry.observe.recorder import open_recording
name, file = open_recording({str(engines.path)!r}, {HEADER!r})
print(name, flush=True)
input()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == f"{engines.path}\n"
    assert engines.start() == "trace-2.jsonl"
    other.communicate("\n", timeout=60)
    assert engines.start() == "trace.jsonl"


@pytest.mark.parametrize("rest", [b"half", b"h" * 200_000])
def test_half_a_line_of_an_engine_that_was_killed_is_removed(engines: Engines, rest: bytes) -> None:
    engines.start()
    engines.write(b"a\n" + rest)
    engines.stop()
    engines.start()
    engines.write(b"b\n")
    assert engines.read() == [b"a\n", b"b\n"]


def test_an_error_names_the_limit_of_recordings_with_one_name(
    engines: Engines,
) -> None:
    for _ in range(MOST_FILES):
        engines.start()
    with pytest.raises(ConfigError, match=rf"^{MOST_FILES} files beside .*trace.jsonl are .*; name another"):
        engines.start()


def test_a_device_gets_a_header_without_being_read(tmp_path: Path) -> None:
    name, file = open_recording("/dev/null", HEADER)
    assert name == "/dev/null"
    file.close()
    with pytest.raises(OSError, match="No space left on device"):
        open_recording("/dev/full", HEADER)
