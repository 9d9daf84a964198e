"""Errors of settings name the value and what may stand in its place, at any depth."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from kvferry.common.errors import ConfigError
from kvferry.common.parse import parse_settings


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    size: int
    mode: Literal["fast", "safe"] = "fast"
    names: dict[str, str] = {}


class Middle(msgspec.Struct, forbid_unknown_fields=True):
    inner: Inner | None = None


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    middle: Middle
    sizes: tuple[int, ...] = ()


def parsed(given: dict[str, Any]) -> Outer:
    return parse_settings("settings", given, Outer, beside=("type",))


def test_keys_beside_the_settings_are_left_out() -> None:
    given = {"type": "x", "middle": {"inner": {"size": 1}}, "sizes": [2]}
    assert parsed(given) == Outer(Middle(Inner(1)), (2,))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mdl": {}}, "settings has no key 'mdl'; did you mean 'middle'?"),
        ({"typ": 1}, "settings has no key 'typ'; did you mean 'type'?"),
        ({"middle": {"iner": {}}}, "middle has no key 'iner'; did you mean 'inner'?"),
        ({"middle": {"inner": {"sise": 1}}}, "inner has no key 'sise'; did you mean 'size'?"),
        ({}, "settings lacks the key 'middle', which is required; set it"),
        (
            {"middle": {"inner": {}}},
            "settings: middle.inner lacks the key 'size', which is required; set it to a whole number",
        ),
        (
            {"middle": {"inner": {"size": "9"}}},
            "settings: middle.inner.size is '9'; it must be a whole number",
        ),
        (
            {"middle": {"inner": {"size": 1, "mode": "slow"}}},
            "settings: middle.inner.mode is 'slow'; it must be one of fast, safe",
        ),
        (
            {"middle": {"inner": {"size": 1, "mode": None}}},
            "settings: middle.inner.mode is null; it must be one of fast, safe, or left out",
        ),
        (
            {"middle": {"inner": {"size": 1, "names": {"a": "b", "c": 3}}}},
            "settings: middle.inner.names.c is a whole number; it must be text",
        ),
        ({"middle": {}, "sizes": [1, 2.5]}, "settings: sizes[1] is 2.5; it must be a whole number"),
    ],
    ids=str,
)
def test_an_invalid_setting_is_an_error(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(given)
    assert str(caught.value) == says
