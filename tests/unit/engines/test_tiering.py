"""Opening the tiers of an engine."""

import pytest

pytest.importorskip("vllm")

from kvferry.engines.vllm.tier_config import FileSettings
from kvferry.engines.vllm.tiering import _default_directory, _open
from kvferry.errors import ConfigError
from kvferry.tiers.tags import TagTable


def test_the_default_directory_is_made_for_the_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = _default_directory()
    assert path == str(tmp_path / "cache" / "kvferry" / "chunks") == _default_directory()
    assert (tmp_path / "cache" / "kvferry" / "chunks").stat().st_mode & 0o777 == 0o700


def test_a_default_directory_that_cannot_be_made_costs_the_tier_not_the_engine(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(ConfigError, match="cannot use /dev/null/kvferry/chunks: Not a directory"):
        _default_directory()


def test_a_directory_under_a_second_name_is_not_opened_again(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError) as caught:
        _open(FileSettings(str(tmp_path / "link")), None, TagTable(), ["/tmp", str(tmp_path)])
    assert str(caught.value) == (
        f"file tier: {tmp_path}/link and {tmp_path}, which is a tier already, are one directory; "
        "name another, or leave out one of the two"
    )
