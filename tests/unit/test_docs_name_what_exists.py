"""Modules and files that package docstrings and the docs name are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kvferry"
PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
DOCS = [path for folder in ("*.md", "docs/**/*.md", "examples/**/*.md") for path in sorted(ROOT.glob(folder))]

found = find_spec("vllm")
VLLM = [Path(folder) for folder in found.submodule_search_locations or []] if found else []

OTHERS = {"kv_transfer_params", "ssm", "conv", "k", "v", "latent", *(f"conv.{part}" for part in "xbckqv")}
"""A key of vLLM's requests, and fields of pages: names, but of no code."""

# One backtick on each side: a name of this project. Two are a name of something else.
NAMED = re.compile(r"(?<!`)`([a-z][a-z_0-9]*(?:\.\w+)*)`(?!`)")
FILE = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|toml|lock|svg))(?::\d+)?`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TEST = re.compile(r"`(?:[\w/.]+::)?(test_\w+)`")
FOLDER = re.compile(r"^  ([a-z/]+)/ ", re.MULTILINE)


@cache
def modules(package: Path) -> frozenset[str]:
    """Modules and packages in this one."""
    return frozenset(path.stem for path in package.iterdir() if path.suffix in ("", ".py"))


@cache
def defined(module: Path) -> frozenset[str]:
    """Functions, classes and constants that a file defines, methods and attributes too."""
    names = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.arg):
            names.add(node.arg if isinstance(node, ast.arg) else node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return frozenset(names)


@cache
def at_top(module: Path) -> frozenset[str]:
    """Functions and classes of a module itself."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(node.name for node in ast.parse(module.read_text()).body if isinstance(node, kinds))


def exists(name: str, package: Path) -> bool:
    """Whether a name, dotted or not, is one of this package's, or of kvferry's from its root."""
    first, *rest = name.split(".")
    if first in modules(package) or first in modules(SOURCE):
        folder = package if first in modules(package) else SOURCE
        if not rest:
            return True
        file = folder / f"{first}.py"
        return rest[0] in defined(file) if file.exists() else exists(".".join(rest), folder / first)
    return any(first in at_top(file) for file in package.glob("*.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_what_a_packages_docstring_names_exists(package):
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    missing = [name for name in NAMED.findall(text) if not exists(name, package)]
    assert not missing, f"{package.relative_to(ROOT)}/__init__.py names what does not exist"


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_the_docs_name_exist(page):
    text = page.read_text()
    named = [name for name in FILE.findall(text) if name != "config.json"]
    known = {path.name for path in (ROOT / "src").rglob("*.py")}
    missing = [
        name
        for name in named
        if not any((folder / name).exists() for folder in (ROOT, ROOT / "src", SOURCE, *VLLM))
        and not ("/" not in name and name in known)
    ]
    missing += [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not missing, f"{page.name} names files that do not exist"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the forge makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in HEADING.findall(text):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(next(s for n in range(99) if (s := f"{slug}-{n}" if n else slug) not in found))
    return found


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_sections_that_the_docs_link_to_exist(page):
    missing = [
        f"{link}#{anchor}"
        for link, anchor in ANCHOR.findall(page.read_text())
        if (target := page.parent / link if link else page).exists() and anchor not in anchors(target)
    ]
    assert not missing, f"{page.name} links to sections that do not exist"


@cache
def names_of_tests() -> frozenset[str]:
    """Return the names of all test functions, and of modules of tests."""
    files = list((ROOT / "tests").rglob("*.py"))
    return frozenset(name for file in files for name in (file.stem, *defined(file)))


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_tests_that_the_docs_name_exist(page):
    missing = [name for name in TEST.findall(page.read_text()) if name not in names_of_tests()]
    assert not missing, f"{page.name} names tests that do not exist"


def test_the_house_has_these_folders_and_no_others():
    text = (ROOT / "docs" / "architecture.md").read_text()
    house = text.split("```")[1]
    named = {name.split("/")[0] for name in FOLDER.findall(house)}
    assert named == {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def test_modules_that_the_architecture_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    missing = [
        name
        for name in NAMED.findall(text)
        if name not in OTHERS
        and not name.endswith(".py")
        and not any(exists(name, package) for package in PACKAGES)
    ]
    assert not missing


def test_make_clean_names_folders_that_exist():
    """All that it searches; what it removes need not be there."""
    makefile = (ROOT / "Makefile").read_text()
    (folders,) = re.findall(r"^\tfind ([\w ]+?) -name __pycache__", makefile, re.MULTILINE)
    assert not [folder for folder in folders.split() if not (ROOT / folder).is_dir()]


def test_functions_of_the_walks_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and line.count("|") == 4]
    named = {name for row in rows for name in re.findall(r"`([A-Z]\w+\.\w+)`", row.split("|")[2])}
    assert len(named) > 30
    known = set()
    for file in (ROOT / "src" / "kvferry").rglob("*.py"):
        for one in ast.walk(ast.parse(file.read_text())):
            if isinstance(one, ast.ClassDef):
                known |= {f"{one.name}.{each.name}" for each in one.body if isinstance(each, ast.FunctionDef)}
    assert named <= known, sorted(named - known)
