"""Lines that a thread writes, in order. The engine neither waits for the disk nor stops with it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from io import FileIO
from pathlib import Path

import pytest

from kvferry.observe.line_file import LineFile, open_line_file
from support.waiting import wait_for


class StuckFile(FileIO):
    """A file on a disk that answers when the test sets `answers`, and takes `step` bytes at a time."""

    def __init__(self, path: Path, step: int = 1 << 20) -> None:
        super().__init__(str(path), "ab")
        self.step, self.answers = step, threading.Event()

    def write(self, data: memoryview) -> int:
        self.answers.wait(60)
        return super().write(data[: self.step])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines"


def opened(path: Path, **limits: int) -> LineFile:
    return LineFile("log", str(path), open_line_file("log", str(path)), **limits)


def line(text: str) -> Callable[[], bytes]:
    # A function of its own, to which a test can hold a weak reference.
    def encoded() -> bytes:
        return f"{text}\n".encode()

    return encoded


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_lines_are_made_and_written_in_a_thread_in_order(path: Path) -> None:
    lines, threads = opened(path), set[int]()

    def numbered(number: int) -> bytes:
        threads.add(threading.get_ident())
        return b"%d\n" % number

    for number in range(100):
        lines.add(lambda number=number: numbered(number), 10)
    lines.close()
    assert path.read_text().split() == [str(number) for number in range(100)]
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_the_rest_of_a_line_is_written_if_the_disk_takes_a_part(path: Path) -> None:
    file = StuckFile(path, step=3)
    file.answers.set()
    lines = LineFile("log", str(path), file)
    lines.add(line("a long line"), 10)
    lines.add(line("another"), 10)
    lines.close()
    assert path.read_text() == "a long line\nanother\n"


def test_lines_are_left_out_and_counted_while_the_disk_is_stuck(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = StuckFile(path)
    lines = LineFile("log", str(path), file, most_queued_bytes=100)
    for number in range(10):
        lines.add(line(str(number)), 30)
    file.answers.set()
    lines.close()
    assert path.read_text().split() == ["0", "1", "2", "3"]
    assert messages(caplog) == [
        f"log: {path} is written too slowly; lines are left out",
        f"log: 6 lines were left out of {path}",
    ]


def test_lines_that_were_written_make_room_for_others(path: Path) -> None:
    lines, texts = opened(path, most_queued_bytes=1), [f"{number}\n" for number in range(20)]

    def is_written(text: str) -> bool:
        # A line is left out until the thread has counted the line before it as written.
        lines.add(line(text.strip()), 1000)
        return path.read_text().endswith(text)

    for text in texts:
        wait_for(partial(is_written, text))
    lines.close()
    assert list(dict.fromkeys(path.read_text().splitlines(keepends=True))) == texts


def test_closing_gives_up_a_stuck_disk_at_its_deadline(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = StuckFile(path)
    lines = LineFile("log", str(path), file, closing_seconds=0.0)
    lines.add(line("a"), 1)
    lines.close()
    assert messages(caplog) == [f"log: {path} is written too slowly; its last lines may be lost"]
    file.answers.set()
    wait_for(lambda: file.closed)


def test_after_an_error_of_the_disk_no_more_lines_are_written(caplog: pytest.LogCaptureFixture) -> None:
    lines, added = opened(Path("/dev/full")), threading.Event()
    lines.add(lambda: b"%d\n" % added.wait(60), 1)
    waiting = line("a")
    held = weakref.ref(waiting)
    lines.add(waiting, 1)
    del waiting
    assert held(), "the line waits"
    added.set()
    lines.close()
    lines.add(line("a"), 1)
    assert messages(caplog) == ["log: No space left on device; no more lines are written"]
    assert not held(), "the memory of lines that will not be written is free"


def test_after_an_error_in_kvferrys_own_code_no_more_lines_are_written(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = opened(path)
    lines.add(line("a"), 1)
    lines.add(lambda: b"%d" % "a", 1)
    lines.add(line("b"), 1)
    lines.close()
    assert path.read_text() == "a\n"
    assert messages(caplog) == ["log: no more lines are written; tell kvferry's authors"]
    assert caplog.records[0].levelno == logging.ERROR


def test_a_closed_file_gets_no_more_lines(path: Path) -> None:
    file = open_line_file("log", str(path))
    lines = LineFile("log", str(path), file)
    lines.close()
    assert file.closed
    lines.add(line("a"), 1)
    lines.close()
    assert path.read_bytes() == b""
