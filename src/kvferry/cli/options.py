"""What commands do with their options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError


def given(**options: Any) -> dict[str, Any]:
    """Those that were given: whose value is not None."""
    return {name: value for name, value in options.items() if value is not None}


def pairs(texts: list[str] | None) -> dict[str, str]:
    """What texts such as ``name=value`` say.

    Raises:
        ConfigError: one has no equals sign, or a name is given twice.
    """
    found: dict[str, str] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or name in found:
            raise ConfigError(f"--option {name}: give each name once, with its value, as in region=eu-west-1")
        found[name] = value
    return found


def write(path: Path, text: str) -> None:
    """Write the file that an option names.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        said = os.strerror(error.errno or 0)
        raise ConfigError(f"cannot write {path}: {said}; name a file that can be written") from error
