"""Packages whose names for other packages are imported only when they are first used."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose ``__init__.pyi`` imports its names.

    The stub is the only list of the names. Type checkers read it, and so does this function, as the package
    `lazy_loader` does for scientific Python (SPEC 1). A command imports only the modules that it needs.
    """

    @cache
    def modules() -> dict[str, str]:
        tree = ast.parse(Path(file).with_suffix(".pyi").read_text())
        return {
            alias.name: str(node.module)
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def get(name: str) -> Any:
        # Not one of Python's own names, which are asked for at every import.
        if not name.startswith("__") and name in modules():
            return getattr(import_module(modules()[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
