"""The file of costs: what is written is read again, anything else is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.planning.strategy import Costs
from kvferry.transport.costs import default_costs_path, load_costs, read_costs, write_costs

COSTS = Costs(1e-6, 2e-11, 3e-6, 4e-9, 5e-11, 6e-4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "costs.json"


def _written(path: Path, **changes: object) -> Path:
    write_costs(path, COSTS, "2026-01-31T12:00:00+00:00", {"cores": 2})
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def test_written_costs_are_read_back(path: Path) -> None:
    assert read_costs(_written(path)) == COSTS
    assert load_costs(str(path)) == COSTS
    assert [found.name for found in path.parent.iterdir()] == ["costs.json"]


def test_the_default_file_is_used_if_it_exists(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_costs_path() == tmp_path / "kvferry" / "costs.json"
    assert load_costs() == Costs()
    _written(default_costs_path())
    assert load_costs() == COSTS


def test_without_a_cache_folder_it_is_in_the_home_folder(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_costs_path({}) == Path("/home/somebody/.cache/kvferry/costs.json")


def _costs(**changes: object) -> dict[str, object]:
    return {**{name: getattr(COSTS, name) for name in Costs.__slots__}, **changes}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 2}, "has version 2, expected 1"),
        ({"more": 1}, "unknown field `more`"),
        ({"costs": _costs(ask_seconds="soon")}, r"Expected `float`, got `str`"),
        ({"costs": _costs(ask_seconds=-1.0)}, "ask_seconds is -1.0, it must be at least 0"),
        ({"costs": {"ask_seconds": 1e-4}}, "copy_byte_seconds differs"),
        ({"costs": _costs(sleep_seconds=1.0)}, "sleep_seconds differs"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(path: Path, changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        read_costs(_written(path, **changes))
    assert str(path) in str(caught.value)
    assert "kvferry doctor --calibrate" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"version": NaN}', b"[" * 100_000])
def test_a_file_of_another_kind_is_refused(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"costs: .*costs\.json"):
        read_costs(path)


def test_a_file_that_is_too_large_is_not_read(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b" " * (2 << 20))
    with pytest.raises(ConfigError, match=r"larger than .* bytes, so it holds no costs"):
        read_costs(path)


def test_a_file_that_is_named_must_exist(path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_costs(str(path))


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*; let this user write there"):
        write_costs(tmp_path / "file" / "costs.json", COSTS, "", {})
