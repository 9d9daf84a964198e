"""Parse and check configured settings, with error messages that name the allowed keys and values."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kvferry.connector.conversion_errors import conversion_error, struct_in
from kvferry.errors import ConfigError

_Settings = TypeVar("_Settings", bound=msgspec.Struct)


def parse_settings(
    where: str, given: Mapping[str, Any], settings: type[_Settings], beside: Sequence[str] = ()
) -> _Settings:
    """Convert an object of the configuration, with all objects inside it, to a class of settings.

    Args:
        where: name of the object in the configuration, for messages.
        given: the object, as parsed from JSON.
        settings: class of the result.
        beside: further keys that the object may have. They are left out of the result.

    Raises:
        ConfigError: a key is unknown (the message names the nearest known one) or missing, or a value has a
            wrong type or is none of the allowed ones.
    """
    _check_all_keys(where, given, settings, beside)
    plain = {key: value for key, value in given.items() if key not in beside}
    try:
        return msgspec.convert(plain, settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}{conversion_error(str(error), plain, settings)}") from error


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


def _check_all_keys(
    where: str, given: Mapping[str, Any], settings: type[msgspec.Struct], beside: Sequence[str] = ()
) -> None:
    fields = msgspec.structs.fields(settings)
    check_keys(where, given, [*beside, *(field.name for field in fields)])
    for field in fields:
        inner, value = struct_in(field.type), given.get(field.name)
        if inner is not None and isinstance(value, Mapping):
            _check_all_keys(field.name, value, inner)
