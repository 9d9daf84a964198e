"""Where engines and their logs leave temporary files, on machines that make that hard."""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.serving.launch import Fleet
from kvferry.tools.serving.processes import compiled_code, temporary_folder, temporary_for_engines

SOCKET = "0bc7fc26-8d1f-43a5-9b0f-0c5a1ae34c12"


def of_length(folder: Path, length: int) -> str:
    """A new folder whose path has that many characters."""
    made = Path(f"{folder}/{'x' * (length - len(str(folder)) - 1)}")
    made.mkdir()
    return str(made)


@pytest.fixture
def short(monkeypatch):
    """A folder of a short name: that of a test may be too long already."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_folder_too_long_for_a_socket_is_refused_and_the_longest_holds_one(short, monkeypatch):
    longest = 107 - len(f"/kvferry-12345678/{SOCKET}")
    monkeypatch.setattr(tempfile, "tempdir", of_length(short, longest))
    with temporary_for_engines() as folder, closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(f"{folder}/{SOCKET}")
    too_long = of_length(short, longest + 1)
    monkeypatch.setattr(tempfile, "tempdir", too_long)
    with pytest.raises(ConfigError, match=rf"TMPDIR is {too_long}, 1 bytes too long for the sockets"):
        Fleet([], short).start()
    assert [*Path(too_long).iterdir()] == []


@pytest.mark.parametrize("make", [temporary_for_engines, lambda: temporary_folder("x")])
def test_missing_temporary_folder_is_one_sentence(make, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="temporary files: No such file or directory; set TMPDIR to"):
        make()


def test_compiled_code_is_kept_in_torchs_own_folder(monkeypatch):
    cache_dir_utils = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    for name in ("kim", "a/b:c"):
        monkeypatch.setenv("LOGNAME", name)
        assert compiled_code() == cache_dir_utils.default_cache_dir()


@pytest.mark.parametrize("umask", [0o777, 0o177, 0o477])
def test_an_umask_that_takes_rights_from_the_owner_is_refused(tmp_path, umask):
    before = os.umask(umask)
    try:
        with pytest.raises(ConfigError, match=rf"umask is 0{umask:o}, .* run umask 077 first"):
            Fleet([], tmp_path / "logs").start()
    finally:
        os.umask(before)
    assert not (tmp_path / "logs").exists()
