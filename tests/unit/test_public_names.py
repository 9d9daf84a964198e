"""The names that packages of the core have for other packages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
STUBS = sorted(SOURCE.rglob("__init__.pyi"))
USERS = SOURCE / "kvferry" / "tools", ROOT / "benchmarks", ROOT / "examples"


def package_of(stub: Path) -> str:
    return ".".join(stub.parent.relative_to(SOURCE).parts)


def names(stub: Path) -> list[str]:
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    return [alias.name for node in imports for alias in node.names]


@cache
def imported() -> frozenset[tuple[str, str]]:
    """Package and name of every ``from PACKAGE import NAME`` outside of the core."""
    return frozenset(
        (str(node.module), alias.name)
        for folder in USERS
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )


@pytest.mark.parametrize("stub", STUBS, ids=package_of)
def test_names_of_a_package_are_those_that_others_use(stub: Path) -> None:
    unused = [name for name in names(stub) if (package_of(stub), name) not in imported()]
    assert not unused, f"remove them from {stub.relative_to(ROOT)}: nobody imports them from the package"


@pytest.mark.parametrize("stub", STUBS, ids=package_of)
def test_a_name_of_a_package_is_not_that_of_a_module_in_it(stub: Path) -> None:
    # The module would replace the name as soon as anybody imports it.
    modules = {path.stem for path in stub.parent.iterdir()}
    assert not modules & set(names(stub))


@pytest.mark.parametrize("stub", [stub for stub in STUBS if "engines" not in stub.parts], ids=package_of)
def test_a_name_of_a_package_is_its_modules(stub: Path) -> None:
    for node in ast.parse(stub.read_text()).body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            here, there = (import_module(str(module)) for module in (package_of(stub), node.module))
            assert getattr(here, alias.name) is getattr(there, alias.name)


def test_a_package_says_which_name_it_does_not_have() -> None:
    with pytest.raises(ImportError, match=re.escape("cannot import name 'Nope' from 'kvferry.tiers'")):
        exec("from kvferry.tiers import Nope")


def test_a_package_imports_no_module_before_a_name_is_used() -> None:
    code = (
        "import sys, kvferry.tiers, kvferry.transport, kvferry.connector, kvferry.engines.vllm\n"
        "print(*(name for name in sys.modules if name.startswith('kvferry.')))\n"
        "from kvferry.tiers import HOST\n"
        "print('kvferry.tiers.names' in sys.modules, 'kvferry.tiers.files.tier' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, then = done.stdout.splitlines()
    assert sorted(loaded.split()) == [
        "kvferry.common",
        "kvferry.common.lazy",
        "kvferry.connector",
        "kvferry.engines",
        "kvferry.engines.vllm",
        "kvferry.tiers",
        "kvferry.transport",
    ]
    assert then == "True False"
