"""Files are written as a whole. A limit on the size of files stands for a full disk: writes fail likewise."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.common.files import create_private_file, replace_file
from kvferry.planning.strategy import Costs
from kvferry.tools.cli.options import write_file
from kvferry.transport.costs import write_costs
from kvferry.transport.security import read_keys, write_secret


@contextmanager
def full_disk() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def machines_key(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(path.parent))
        read_keys(None)


WRITERS: dict[str, Callable[[Path], None]] = {
    "report of a command": lambda path: write_file(path, "a page"),
    "measured costs": lambda path: write_costs(path, Costs(), "now", {}),
    "secret of engines": write_secret,
    "key of the machine": machines_key,
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_a_write_that_fails_is_an_error_and_leaves_no_file(tmp_path: Path, writer) -> None:
    path = tmp_path / "file"
    with full_disk(), pytest.raises(ConfigError, match="File too large"):
        writer(path)
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == []
    writer(path)


@pytest.mark.parametrize("through_link", [False, True])
def test_a_file_that_is_replaced_keeps_its_permissions_and_on_a_failure_its_content(
    tmp_path: Path, through_link: bool
) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("before")
    path.chmod(0o640)
    link.symlink_to(path)
    given = link if through_link else path
    with full_disk(), pytest.raises(OSError, match="File too large"):
        replace_file(given, "too long")
    assert path.read_text() == "before"
    replace_file(given, "after")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("after", 0o640)
    assert {one.name for one in tmp_path.iterdir()} == {"file", "link"}
    assert link.is_symlink()


@pytest.mark.parametrize("writer", [replace_file, create_private_file])
def test_a_rename_that_fails_leaves_nothing_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Callable[[Path, str], None]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(PermissionError):
        writer(tmp_path / "file", "text")
    assert {one.name for one in tmp_path.iterdir()} <= {"file"}


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace_file(pipe, "text")
        assert os.read(reader, 9) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_new_file_replaces_no_other_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    create_private_file(path, "mine")
    for taken in (path, tmp_path / "link"):
        if taken != path:
            taken.symlink_to(tmp_path / "nowhere")
        with pytest.raises(FileExistsError):
            create_private_file(taken, "other")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("mine", 0o600)
    assert {one.name for one in tmp_path.iterdir()} == {"file", "link"}
