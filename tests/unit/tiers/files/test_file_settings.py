"""The settings of the file tier: its directory."""

import errno
import os

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tiers.files import opening as directory_checks
from kvferry.tiers.files.tier import FileSettings, make_default_directory
from kvferry.tiers.index import KeyTable


def test_the_default_directory_is_made_for_the_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_default_directory()
    assert path == str(tmp_path / "cache" / "kvferry" / "chunks") == make_default_directory()
    assert (tmp_path / "cache" / "kvferry" / "chunks").stat().st_mode & 0o777 == 0o700


def test_a_default_directory_that_cannot_be_made_costs_the_tier_not_the_engine(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(ConfigError, match="cannot use /dev/null/kvferry/chunks: Not a directory"):
        make_default_directory()


def test_a_directory_under_a_second_name_is_not_opened_again(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    earlier = [FileSettings("/tmp"), FileSettings(str(tmp_path))]
    with pytest.raises(ConfigError) as caught:
        FileSettings(str(tmp_path / "link")).open(None, KeyTable(), earlier)
    assert str(caught.value) == (
        f"file tier: {tmp_path}/link and {tmp_path}, which is a tier already, are one directory; "
        "name another, or leave out one of the two"
    )


@pytest.mark.parametrize("path", ["/proc", "/proc/self", "/sys"])
def test_a_file_system_that_holds_no_files_is_refused(path):
    with pytest.raises(
        ConfigError, match=f"no file can be written to {path}: .*; name a directory on a disk"
    ):
        FileSettings(path).check_storage()


@pytest.mark.parametrize(
    ("call", "number"), [("pwrite", errno.EINVAL), ("pwrite", errno.EROFS), ("flock", 37)]
)
def test_a_file_system_that_cannot_hold_chunks_is_refused_and_left_as_it_was(
    tmp_path, monkeypatch, call, number
):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(directory_checks.fcntl if call == "flock" else os, call, refuse)
    with pytest.raises(ConfigError, match=f"no file can be written to {tmp_path}: {os.strerror(number)}"):
        FileSettings(str(tmp_path)).check_storage()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_accepted_because_chunks_go_for_new_ones(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    FileSettings(str(tmp_path)).check_storage()
