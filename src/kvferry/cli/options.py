"""Helpers for command-line options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError


def without_none(**options: Any) -> dict[str, Any]:
    """Return the options whose value is not None."""
    return {name: value for name, value in options.items() if value is not None}


def parse_pairs(texts: list[str] | None) -> dict[str, str]:
    """Return the names and values of texts such as ``name=value``.

    Raises:
        ConfigError: a text has no equals sign, or a name is given twice.
    """
    found: dict[str, str] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or name in found:
            raise ConfigError(f"--option {name}: give each name once, with its value, as in region=eu-west-1")
        found[name] = value
    return found


def write_file(path: Path, text: str) -> None:
    """Write the file that an option names.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        said = os.strerror(error.errno or 0)
        raise ConfigError(f"cannot write {path}: {said}; name a file that can be written") from error
