"""Helpers for the options of commands."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import typer

from kvferry.errors import ConfigError
from kvferry.units import parse_count
from kvferry.whole_file import replace_file


def without_none(**options: Any) -> dict[str, Any]:
    """Return the given options, without those whose value is None."""
    return {name: value for name, value in options.items() if value is not None}


def count_option(help_text: str, least: int | None = None, most: int | None = None) -> Any:
    """Return an option for a count, such as a number of tokens, which may be written as ``32k``.

    Args:
        help_text: help of the option.
        least, most: bounds of the count; None for none.
    """

    def parse(value: str | int) -> int:
        count = parse_count(str(value))  # Typer passes defaults too
        if least is not None and count < least:
            raise ValueError(f"give at least {least:,}")
        if most is not None and count > most:
            raise ValueError(f"give at most {most:,}")
        return count

    return typer.Option(metavar="COUNT", parser=parse, help=help_text)


def parse_pairs(texts: list[str] | None) -> dict[str, str]:
    """Parse texts such as ``name=value``, and return the values by name.

    Args:
        texts: values of an option that may be repeated; None if it is not given.

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


def check_folder(path: Path | None) -> None:
    """Check that the folder of a file exists and may be written to, before the work that fills the file.

    Args:
        path: path of a file that is written later; None for no file.

    Raises:
        ConfigError: the file cannot be created.
    """
    if path is None or (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        return
    number = errno.EACCES if path.parent.is_dir() else errno.ENOENT
    raise _cannot_write(path, number)


def write_file(path: Path, text: str) -> None:
    """Write text to a file whose path is the value of an option. Replaces an existing file as a whole.

    Args:
        path: path of the file.
        text: content of the file.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        replace_file(path, text)
    except OSError as error:
        raise _cannot_write(path, error.errno) from error


def _cannot_write(path: Path, number: int | None) -> ConfigError:
    return ConfigError(f"cannot write {path}: {os.strerror(number or 0)}; name a file that can be written")
