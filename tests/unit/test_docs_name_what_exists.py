"""Modules, files and tests named in docstrings of packages and in the docs exist."""

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
FUNCTION = re.compile(r"^ *def (test_\w+)\(", re.MULTILINE)
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
def test_names_in_the_docstring_of_a_package_exist(package):
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    missing = [name for name in NAMED.findall(text) if not exists(name, package)]
    assert not missing, f"correct these names in {package.relative_to(ROOT)}/__init__.py: they do not exist"


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_named_in_the_docs_exist(page):
    text = page.read_text()
    named = [name for name in FILE.findall(text) if name not in ("config.json", "kvferry.toml")]
    known = {path.name for path in (ROOT / "src").rglob("*.py")}
    missing = [
        name
        for name in named
        if not any((folder / name).exists() for folder in (ROOT, ROOT / "src", SOURCE, *VLLM))
        and not ("/" not in name and name in known)
    ]
    missing += [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not missing, f"correct these names in {page.relative_to(ROOT)}: no such files exist"


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
def test_sections_linked_from_the_docs_exist(page):
    missing = [
        f"{link}#{anchor}"
        for link, anchor in ANCHOR.findall(page.read_text())
        if (target := page.parent / link if link else page).exists() and anchor not in anchors(target)
    ]
    assert not missing, f"correct these links in {page.relative_to(ROOT)}: no such headings exist"


@cache
def names_of_tests() -> frozenset[str]:
    """Return the names of all test functions, and of modules of tests."""
    files = list((ROOT / "tests").rglob("*.py"))
    return frozenset(name for file in files for name in (file.stem, *FUNCTION.findall(file.read_text())))


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_tests_named_in_the_docs_exist(page):
    missing = [name for name in TEST.findall(page.read_text()) if name not in names_of_tests()]
    assert not missing, f"correct these names in {page.relative_to(ROOT)}: no such tests exist"


def test_the_architecture_lists_every_package_of_kvferry():
    text = (ROOT / "docs" / "architecture.md").read_text()
    house = text.split("```")[1]
    named = {name.split("/")[0] for name in FOLDER.findall(house)}
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    lines = "".join(f"  {name}/    PURPOSE\n" for name in sorted(packages - named))
    assert not lines, f"add to the tree of packages in docs/architecture.md:\n{lines}"
    assert not named - packages, "remove these from the tree of packages in docs/architecture.md"


def test_modules_named_in_the_architecture_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    missing = [
        name
        for name in NAMED.findall(text)
        if name not in OTHERS
        and not name.endswith(".py")
        and not any(exists(name, package) for package in PACKAGES)
    ]
    assert not missing, (
        "correct these names in docs/architecture.md, or add them to OTHERS if they are no code"
    )


def test_make_clean_names_folders_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    (folders,) = re.findall(r"^\tfind ([\w ]+?) -name __pycache__", makefile, re.MULTILINE)
    missing = [folder for folder in folders.split() if not (ROOT / folder).is_dir()]
    assert not missing, "correct the folders that `make clean` searches in Makefile"


def test_methods_named_in_the_walks_of_the_architecture_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and line.count("|") == 4]
    named = {name for row in rows for name in re.findall(r"`([A-Z]\w+\.\w+)`", row.split("|")[2])}
    assert len(named) > 30
    declared = re.compile(
        rf"^class (?:{'|'.join({name.partition('.')[0] for name in named})})\b", re.MULTILINE
    )
    known = {
        f"{node.name}.{each.name}"
        for text in (file.read_text() for file in SOURCE.rglob("*.py"))
        if declared.search(text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.FunctionDef)
    }
    missing = sorted(named - known)
    assert not missing, "correct these names in the tables of docs/architecture.md: no such methods exist"
