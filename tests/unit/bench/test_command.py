"""`kvferry bench` refuses in words what it cannot measure."""

from __future__ import annotations

import pytest
import typer

from kvferry.cli.bench import register
from kvferry.errors import ConfigError


def _run(*arguments: str) -> None:
    app = typer.Typer()
    register(app)
    app(["bench", *arguments], standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("transfer", "--geometry", "Llama-3.1-9B"),
            "no model is called 'Llama-3.1-9B'; did you mean Llama-3.1-8B",
        ),
        (("transfer", "--geometry", "gpt-oss-20b"), "layers of several kinds; bench layout measures those"),
        (
            ("transfer", "--order", "sorted"),
            "--order sorted is not known; choose one of scattered, contiguous",
        ),
        (("layout", "--geometry", "gpt-9"), "no model is called 'gpt-9'"),
        (("layout", "--layouts", "LBNHC,HND"), "--layouts HND is not known; choose of LBNHC"),
        (("layout", "--parallel", "1:1,2"), "--parallel 2 is not two numbers of ranks, like 2:1"),
        (("layout", "--parallel", "0:1"), "--parallel 0:1 is not two numbers of ranks"),
        (("layout", "--parallel", "3:1", "--geometry", "Qwen3-0.6B"), "8 heads on 3 tensor-parallel ranks"),
        (("offload", "--parts", "tiers,speed"), "--parts speed is not known; choose of tiers, lookup"),
        (("offload", "--depths", "1,0"), "--depths 0 is not a number from 1 to 256"),
        (("offload", "--path", "/nowhere"), "--path /nowhere is no folder; make it"),
        (
            ("safety", "--parts", "curve,locks"),
            "--parts locks is not known; choose of lease, checksum, curve",
        ),
        (("choice", "--sources", "peers"), "--sources peers is not known; choose one of connectors, tiers"),
        (("choice", "--trace", "/nowhere"), "--trace /nowhere: No such file or directory; name a file"),
        (("choice", "--longest", "64"), "--longest 64 is less than 1280, 20 blocks of 64: raise it"),
        (("layout", "--plot", "table.png"), r"--plot table.png is not an .svg file"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _run(*arguments)


def test_a_cache_that_cannot_be_written_to_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(
        ConfigError, match=r"cannot make a folder in /proc/none/kvferry: .* name one with --path"
    ):
        _run("offload")


@pytest.mark.parametrize("command", ["transfer", "layout", "calibrate", "offload"])
def test_fewer_rounds_than_a_median_needs_are_refused(command: str) -> None:
    with pytest.raises(Exception, match="7"):
        _run(command, "--repeats", "6")


def test_a_picture_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.bench.layout.measure", lambda *_: None)
    monkeypatch.setattr("kvferry.bench.layout_plot.picture", lambda tables: "<svg/>")
    with pytest.raises(ConfigError, match=r"cannot write /nowhere/x\.svg: No such file"):
        _run("layout", "--geometry", "Qwen3-0.6B", "--plot", "/nowhere/x.svg")
