"""Sentences for users count with `units.counted` and `units.plural`: never ``1 blocks`` or ``rank(s)``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvferry

ROOT = Path(kvferry.__file__).parent
NOUNS = (
    "block|byte|check|chunk|connector|day|descriptor|digest|engine|entrie|event|file|group|key|layer|lease|"
    "object|page|peer|prompt|rank|request|round|second|snapshot|tier|token|unit|user|warning"
)
COUNTED = re.compile(rf" (more )?({NOUNS})s\b")
FOR_PEOPLE = ("cli", "doctor", "explain", "top")
"""Packages whose sentences all go to users."""


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text after a value that is not a constant of its module)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            for value, after in zip(node.values, node.values[1:], strict=False):
                is_constant = isinstance(value, ast.FormattedValue) and ast.unparse(value.value).isupper()
                if (
                    isinstance(value, ast.FormattedValue)
                    and isinstance(after, ast.Constant)
                    and not is_constant
                ):
                    yield node.lineno, str(after.value)


@pytest.mark.parametrize("package", FOR_PEOPLE)
def test_a_number_before_a_noun_is_counted(package):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: ...{text}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in sentences(path)
        if COUNTED.match(text)
    ]
    assert not wrong, "write the number and its noun with kvferry.common.units.counted or plural"


def test_no_noun_has_its_plural_in_brackets():
    texts = {path: path.read_text() for path in ROOT.rglob("*.py")}
    wrong = [path for path, text in texts.items() if re.search(rf"\b({NOUNS})\(s\)", text)]
    assert not wrong, "write the number and its noun with kvferry.common.units.counted"
