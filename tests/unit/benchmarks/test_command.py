"""`python -m benchmarks` refuses in words what it cannot measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import app
from kvferry.common.errors import ConfigError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def _run(*arguments: str) -> None:
    app(arguments, standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("layout", "--geometry", "gpt-9"), "no model is called 'gpt-9'"),
        (("layout", "--layouts", "LBNHC,HND"), "--layouts HND is not known; choose from LBNHC"),
        (("layout", "--parallel", "1:1,2"), "--parallel 2 is not two numbers of ranks, like 2:1"),
        (("layout", "--parallel", "0:1"), "--parallel 0:1 is not two numbers of ranks"),
        (("layout", "--parallel", "3:1", "--geometry", "Qwen3-0.6B"), "8 heads on 3 tensor-parallel ranks"),
        (("layout", "--plot", "table.png"), r"--plot table.png is not an .svg file"),
        (("offload", "--parts", "lookup,speed"), "--parts speed is not known; choose from lookup, asking"),
        (("offload", "--path", "/nowhere"), "--path /nowhere is not a folder; create it"),
        (
            ("safety", "--parts", "curve,locks"),
            "--parts locks is not known; choose from lease, verify, checksum, encrypt, curve",
        ),
        (("choice", "--sources", "peers"), "--sources peers is not known; choose one of connectors, tiers"),
        (("choice", "--trace", "/nowhere"), "--trace /nowhere: No such file or directory; name a file"),
        (("choice", "--longest", "64"), "--longest 64 is less than 1280, 20 blocks of 64: raise it"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _run(*arguments)


@pytest.mark.parametrize("command", ["layout", "offload", "safety"])
def test_fewer_rounds_than_a_median_needs_are_refused(command: str) -> None:
    with pytest.raises(Exception, match="7"):
        _run(command, "--repeats", "6")


def test_a_picture_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.layout.measure.measure", lambda *_: None)
    monkeypatch.setattr("benchmarks.layout.plot.picture", lambda tables: "<svg/>")
    with pytest.raises(ConfigError, match=r"cannot write /nowhere/x\.svg: No such file"):
        _run("layout", "--geometry", "Qwen3-0.6B", "--plot", "/nowhere/x.svg")


def test_error_is_one_sentence_and_exit_code_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "safety", "--repeats", "6"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvferry: --repeats is '6'; ")
    assert done.stderr.count("\n") == 1
