"""Checks of configured settings, with error messages that name the allowed keys and values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from kvferry.errors import ConfigError

_NO_CHOICE = re.compile(r"Invalid enum value (.*) - at `\$\.(\w+)`")


def settings_error(where: str, error: msgspec.ValidationError, settings: type[msgspec.Struct]) -> ConfigError:
    """Return the error to raise when msgspec cannot convert an object of the configuration.

    If the value of a setting must be one of certain strings, the message lists them.

    Args:
        where: name of the object in the configuration, for the message.
        error: error that msgspec raised.
        settings: class to which the object was to be converted.
    """
    if (found := _NO_CHOICE.fullmatch(str(error))) is None:
        return ConfigError(f"{where}: {error}")
    value, key = found.groups()
    known = [_choices(field.type) for field in msgspec.structs.fields(settings) if field.name == key]
    return ConfigError(f"{where}: {key} is {value}; it must be one of {', '.join(*known)}")


def check_keys(where: str, settings: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that an object of the configuration has only known keys.

    Args:
        where: name of the object, for the message.
        settings: the object, as parsed from JSON.
        known: keys that the object may have.

    Raises:
        ConfigError: a key is unknown. The message names the most similar known key, or else all known keys.
    """
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{where} has no key {key!r}; {hint}")


def check_text(where: str, value: Any) -> None:
    r"""Check that all strings in a setting can be encoded as UTF-8; a lone surrogate (``"\\ud800"``) cannot.

    Args:
        where: name of the setting, for the message.
        value: value of the setting, as parsed from JSON.

    Raises:
        ConfigError: a string cannot be encoded.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{where} is {value!r}, expected text: it has half of a surrogate pair at {error.start}; "
                "write the whole character"
            ) from error
    elif isinstance(value, Mapping):
        for key, one in value.items():
            check_text(f"a key of {where}", key)
            check_text(f"{where}.{key}", one)
    elif isinstance(value, Sequence):
        for number, one in enumerate(value):
            check_text(f"{where}[{number}]", one)


def _choices(of: Any) -> Iterator[str]:
    for each in get_args(of):
        if isinstance(each, str):
            yield each
        else:
            yield from _choices(each)
