"""Errors for settings with a value that they cannot have."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from kvferry.errors import ConfigError

_NO_CHOICE = re.compile(r"Invalid enum value (.*) - at `\$\.(\w+)`")


def unusable(where: str, error: msgspec.ValidationError, settings: type[msgspec.Struct]) -> ConfigError:
    """Return the error for settings that msgspec refused; it lists the values of a setting with a few.

    Args:
        where: they were given.
        error: of msgspec.
        settings: what they were to be.
    """
    if (found := _NO_CHOICE.fullmatch(str(error))) is None:
        return ConfigError(f"{where}: {error}")
    value, key = found.groups()
    known = [_choices(field.type) for field in msgspec.structs.fields(settings) if field.name == key]
    return ConfigError(f"{where}: {key} is {value}; it must be one of {', '.join(*known)}")


def check_keys(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that all keys of an object are known.

    Args:
        where: names the object.
        given: the object.
        known: keys that it may have.

    Raises:
        ConfigError: one is not known; the message names the nearest known key.
    """
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{where} has no key {key!r}; {hint}")


def check_text(where: str, given: Any) -> None:
    r"""Check that all texts of a setting can be written as UTF-8; a lone surrogate (``"\\ud800"``) cannot.

    Args:
        where: names the setting.
        given: its value, as JSON has it.

    Raises:
        ConfigError: one cannot.
    """
    if isinstance(given, str):
        try:
            given.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{where} is {given!r}, expected text: it has half of a surrogate pair at {error.start}; "
                "write the whole character"
            ) from error
    elif isinstance(given, Mapping):
        for key, value in given.items():
            check_text(f"a key of {where}", key)
            check_text(f"{where}.{key}", value)
    elif isinstance(given, Sequence):
        for number, value in enumerate(given):
            check_text(f"{where}[{number}]", value)


def _choices(of: Any) -> Iterator[str]:
    for each in get_args(of):
        if isinstance(each, str):
            yield each
        else:
            yield from _choices(each)
