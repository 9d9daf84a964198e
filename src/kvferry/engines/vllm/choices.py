"""What is said of a setting that has one of a few values, and was given another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from kvferry.errors import ConfigError

_NO_CHOICE = re.compile(r"Invalid enum value (.*) - at `\$\.(\w+)`")


def unusable(where: str, error: msgspec.ValidationError, settings: type[msgspec.Struct]) -> ConfigError:
    """What is wrong with settings; of one that has a few values, which these are.

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


def _choices(of: Any) -> Iterator[str]:
    for each in get_args(of):
        if isinstance(each, str):
            yield each
        else:
            yield from _choices(each)
