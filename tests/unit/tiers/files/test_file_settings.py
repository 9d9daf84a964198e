"""The settings of the file tier: its directory."""

import pytest

from kvferry.errors import ConfigError
from kvferry.tiers.files.settings import FileSettings, make_default_directory
from kvferry.tiers.index.key_table import KeyTable


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
