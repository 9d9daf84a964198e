"""Mutants of kvferry: small faults drawn by a seed and planted in a copy of its source, behind a switch.

The copy holds all mutants at once. `KVFERRY_MUTANT` switches one of them on, so that nothing is built again
between them. `KVFERRY_MUTANT_LOG` names a folder where every mutant notes which tests run its line.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}  # fmt: skip
SWITCH = '''"""Tells which mutant is on, and notes which tests reach each."""

import os

_ON = int(os.environ.get("KVFERRY_MUTANT", "-1"))
_LOG = os.environ.get("KVFERRY_MUTANT_LOG")
_seen = set()


def on(number):
    if _LOG:
        test = os.environ.get("PYTEST_CURRENT_TEST", "at import").rpartition(" ")[0] or "at import"
        if (number, test) not in _seen:
            _seen.add((number, test))
            with open(os.path.join(_LOG, str(number)), "a") as file:
                file.write(test + chr(10))
    return number == _ON
'''


@dataclass(frozen=True)
class Mutant:
    """A fault of one place.

    Attributes:
        number: place in the draw.
        file: path below the package's folder.
        line: line in the unchanged file.
        text: the change, for people.
    """

    number: int
    file: str
    line: int
    text: str


def draw(package: Path, folders: Sequence[str], seed: int, count: int) -> tuple[list[Mutant], dict[str, str]]:
    """Draw mutants in equal numbers from some folders of a package.

    Args:
        package: folder of the package, such as ``src/kvferry``.
        folders: subfolders to draw from.
        seed: decides the draw.
        count: number of mutants.

    Returns:
        The mutants, and the new text of each file that has any.
    """
    random_ = random.Random(seed)
    chosen: dict[str, list[int]] = {}
    for place, folder in enumerate(folders):
        files = sorted(str(path.relative_to(package)) for path in (package / folder).rglob("*.py"))
        sites = [(file, site) for file in files for site in range(_count(package / file))]
        share = count // len(folders) + (place < count % len(folders))
        for file, site in random_.sample(sites, share):
            chosen.setdefault(file, []).append(site)
    mutants: list[Mutant] = []
    texts: dict[str, str] = {}
    for file, sites in sorted(chosen.items()):
        texts[file] = _planted(package / file, file, sorted(sites), mutants)
    return mutants, texts


def _count(path: Path) -> int:
    return sum(1 for _ in _sites(ast.parse(path.read_text())))


def _planted(path: Path, file: str, sites: list[int], mutants: list[Mutant]) -> str:
    tree = ast.parse(path.read_text())
    found = [*_sites(tree)]
    replaced: dict[int, tuple[int, ast.AST]] = {}
    for site in sites:
        node, changed = found[site]
        number = len(mutants)
        line = getattr(node, "lineno", 0)
        mutants.append(Mutant(number, file, line, f"{_shown(node)}  ->  {_shown(changed)}"))
        replaced[id(node)] = number, changed
    tree = _Planter(replaced).visit(tree)
    at = next(
        (n for n, one in enumerate(tree.body) if not _is_docstring(one) and not _is_future(one)),
        len(tree.body),
    )
    tree.body.insert(at, ast.parse("from kvferry.mutant_switch import on as _mutant_on").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def _shown(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:100] if not isinstance(node, ast.Pass) else "(nothing)"


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


class _Planter(ast.NodeTransformer):
    """Puts each mutant beside the original, behind its switch."""

    def __init__(self, replaced: dict[int, tuple[int, ast.AST]]) -> None:
        self._replaced = replaced

    def visit(self, node: ast.AST) -> ast.AST:
        found = self._replaced.get(id(node))
        node = self.generic_visit(node)
        if found is None:
            return node
        number, changed = found
        test = ast.Call(ast.Name("_mutant_on", ast.Load()), [ast.Constant(number)], [])
        if isinstance(node, ast.expr):
            return ast.IfExp(test, changed, node)
        return ast.If(test, [changed], [node])


def _sites(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield each node that can be changed, and its change, in a fixed order."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if (changed := _changed(node)) is not None:
            yield node, changed
        stack.extend(reversed([*_children(node)]))


NOT_RUN = {"annotation", "returns", "decorator_list", "bases", "exc", "pattern", "msg"}
"""Fields of nodes that hold types, messages of errors, or patterns."""


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that run and decide more than words."""
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Assign | ast.AnnAssign) and "TypeAlias" in ast.unparse(node):
        return
    for name, value in ast.iter_fields(node):
        if name not in NOT_RUN:
            yield from (
                one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST)
            )


def _changed(node: ast.AST) -> ast.AST | None:
    """Return a changed copy of a node; None if there is no change for its kind."""
    new: Any = copy.deepcopy(node)
    return _changed_statement(new) if isinstance(new, ast.stmt) else _changed_expression(new)


def _changed_statement(new: Any) -> ast.AST | None:
    match new:
        case ast.AugAssign(op=op) if type(op) in OPERATORS:
            new.op = OPERATORS[type(op)]()
        case ast.If(test=test):
            new.test = ast.UnaryOp(ast.Not(), test)
        case ast.Return(value=value) if value is not None and not _is_none(value):
            new.value = ast.Constant(None)
        case ast.Expr(value=ast.Call()) if "log" not in ast.unparse(new.value.func).lower():
            return ast.Pass()
        case ast.Break():
            return ast.Continue()
        case ast.Continue():
            return ast.Break()
        case _:
            return None
    return new


def _changed_expression(new: Any) -> ast.AST | None:
    match new:
        case ast.Compare(ops=[op, *_]):
            new.ops[0] = COMPARISONS[type(op)]()
        case ast.BinOp(op=op) if type(op) in OPERATORS and not _is_text(new):
            new.op = OPERATORS[type(op)]()
        case ast.BoolOp(op=op):
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            return new.operand
        case ast.Constant(value=bool() | int() as value):
            new.value = not value if isinstance(value, bool) else value + 1
        case ast.IfExp(test=test):
            new.test = ast.UnaryOp(ast.Not(), test)
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            new.func = ast.Name("max" if name == "min" else "min", ast.Load())
        case _:
            return None
    return new


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str)
        for side in (node.left, node.right)
    )
