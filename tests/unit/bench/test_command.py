"""`kvferry bench` refuses in words what it cannot measure."""

from __future__ import annotations

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.cli.bench import app


def _run(*arguments: str) -> None:
    app([*arguments], standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("transfer", "--geometry", "Llama-3.1-9B"),
            "no model is called 'Llama-3.1-9B'; did you mean Llama-3.1-8B",
        ),
        (
            ("transfer", "--geometry", "gpt-oss-20b"),
            "has layers of several kinds; this command moves models whose layers are alike",
        ),
        (
            ("transfer", "--order", "sorted"),
            "--order sorted is not known; choose one of scattered, contiguous",
        ),
        (("tiers", "--layouts", "LBNHC,HND"), "--layouts HND is not known; choose from LBNHC"),
        (("tiers", "--depths", "1,0"), "--depths 0 is not a number from 1 to 256"),
        (("tiers", "--path", "/nowhere"), "--path /nowhere is not a folder; create it"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _run(*arguments)


def test_a_cache_that_cannot_be_written_to_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(
        ConfigError, match=r"cannot create a folder in /proc/none/kvferry: .* name one with --path"
    ):
        _run("tiers")


@pytest.mark.parametrize("command", ["transfer", "tiers"])
def test_fewer_rounds_than_a_median_needs_are_refused(command: str) -> None:
    with pytest.raises(Exception, match="7"):
        _run(command, "--repeats", "6")
