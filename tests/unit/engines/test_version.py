"""Releases of vLLM that kvferry does not support are refused before anything of vLLM is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm.version import SUPPORTED, TESTED, check_release
from kvferry.tools.cli.main import app

OTHERS = ("0.30.2", "0.34.0", "0.34.0rc1", "1.0.0", "0.1.dev7+g12345")


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """A folder for the path, in which a newer vLLM is installed that fails if it is imported."""
    info = tmp_path / "vllm-0.34.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.34.0\n")
    (tmp_path / "vllm.py").write_text("raise AssertionError('vLLM was imported')")
    return tmp_path


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(path)!r}); {code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("release", [None, *(f"{minor}.0" for minor in SUPPORTED), f"{TESTED}.3+cpu"])
def test_supported_releases_and_none_at_all_pass(release: str | None) -> None:
    check_release(release)


@pytest.mark.parametrize("release", OTHERS)
def test_any_other_release_is_refused_in_one_sentence(release: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_release(release)
    said = str(refused.value)
    assert said.startswith(f"vLLM {release} is installed; kvferry works with 0.31, 0.32 or 0.33; install")
    assert "\n" not in said


@pytest.mark.parametrize("module", ["connector", "multi.connector"])
def test_a_connector_refuses_a_newer_vllm_before_it_imports_it(module: str, newer: Path) -> None:
    ended = run(f"import kvferry.engines.vllm.{module}", newer)
    assert "ConfigError: vLLM 0.34.0 is installed" in ended.stderr
    assert "vLLM was imported" not in ended.stderr


def test_the_plugin_lets_a_newer_vllm_start_without_kvferry_and_says_why(newer: Path) -> None:
    ended = run("from kvferry.engines.vllm.plugin import register; register()", newer)
    assert ended.returncode == 0, ended.stderr
    assert "kvferry: vLLM 0.34.0 is installed; kvferry works with" in ended.stderr


@pytest.mark.parametrize("command", [["serve", "some-model"], ["demo"]])
def test_commands_that_start_engines_refuse_a_newer_vllm(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.engines.vllm.version.vllm_version", lambda: "0.34.0")
    ended = CliRunner().invoke(app, command)
    assert isinstance(ended.exception, ConfigError)
    assert "vLLM 0.34.0 is installed" in str(ended.exception)
