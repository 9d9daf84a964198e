from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import requires
from itertools import chain
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import kvferry
from kvferry.engines.vllm.version import SUPPORTED, TESTED, is_supported

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "vllm", "nixl")


def pins(lock: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    rows = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in rows}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {normal(re.match(r"[\w.-]+", each)[0]) for each in requirements}


def test_every_dependency_is_pinned_for_the_cpu() -> None:
    assert names(project()["dependencies"]) <= pins("vllm-cpu.lock").keys()


def test_every_tool_is_pinned() -> None:
    assert names(project()["optional-dependencies"]["dev"]) <= pins("dev.lock").keys()


def test_pins_and_pages_name_the_supported_releases_of_vllm() -> None:
    pinned = pins("vllm-cpu.lock")["vllm-cpu"]
    assert pinned.rpartition(".")[0] == TESTED
    others = pins("releases.lock").values()
    assert sorted(one.rpartition(".")[0] for one in (pinned, *others)) == list(SUPPORTED)
    ci = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"make contract VLLM=(\S+)", ci) == sorted(others)
    [extra] = [each for each in project()["optional-dependencies"]["vllm"] if each.startswith("vllm")]
    allowed = SpecifierSet(extra.removeprefix("vllm"))
    for minor in range(25, 45):
        assert allowed.contains(f"0.{minor}.1") == is_supported(f"0.{minor}.1")
    said = f"{', '.join(SUPPORTED[:-1])} and {SUPPORTED[-1]}"
    for page in ("README.md", "docs/compatibility.md"):
        assert f"vLLM {said}" in (ROOT / page).read_text(), page


def test_both_locks_agree_where_they_overlap() -> None:
    engine, tools = pins("vllm-cpu.lock"), pins("dev.lock")
    assert {name: tools[name] for name in engine.keys() & tools.keys()} == {
        name: engine[name] for name in engine.keys() & tools.keys()
    }


def test_every_dependency_says_why_it_is_here() -> None:
    said = (ROOT / "docs" / "dependencies.md").read_text()
    asked = [*project()["dependencies"], *chain.from_iterable(project()["optional-dependencies"].values())]
    assert not [name for name in names(asked) if f"`{name}`" not in said]


def test_lm_eval_is_pinned_without_torch_and_the_page_says_why_it_is_here() -> None:
    pinned = pins("accuracy.lock").keys()
    assert "lm-eval" in pinned
    assert not pinned & set(HEAVY)
    assert "`lm_eval`" in (ROOT / "docs" / "dependencies.md").read_text()


def test_the_core_needs_no_engine() -> None:
    plain = [each for each in requires("kvferry") if "extra ==" not in each]
    assert not names(plain) & set(HEAVY)


@pytest.mark.parametrize(
    "module", ["kvferry.cli.main", "kvferry.doctor.examine", "kvferry.serving.tiny", "kvferry.serving.demo"]
)
def test_importing_is_light(module: str) -> None:
    code = f"import sys, {module}; print(*(set(sys.modules) & {set(HEAVY)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["cc", "no-such-compiler"])
def test_the_wheel_has_the_package_its_marker_and_its_licence(tmp_path: Path, compiler: str) -> None:
    if compiler == "cc" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path / "dist")]
    environment = {**os.environ, "CC": compiler}
    subprocess.run([*command, str(tree)], check=True, capture_output=True, env=environment)
    [wheel] = (tmp_path / "dist").iterdir()
    inside = set(zipfile.ZipFile(wheel).namelist())
    platform = wheel.name.removeprefix(f"kvferry-{kvferry.__version__}-py3-none-").removesuffix(".whl")
    assert platform.startswith("linux_") if compiler == "cc" else platform == "any"
    assert ("kvferry/memory/_strided_copy.so" in inside) == (compiler == "cc")
    assert {"kvferry/py.typed", "kvferry/plan/models.toml", "kvferry/memory/strided_copy.c"} <= inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert sources <= inside
