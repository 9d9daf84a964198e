"""Objects of the configuration, converted to classes of settings.

msgspec says which type it expected where. A message here names the value as it stands in the configuration,
and what may stand there, in the words of JSON.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec

from kvferry.common.errors import ConfigError
from kvferry.common.text import shown

_NO_CHOICE = re.compile(r"Invalid enum value .* - at `\$(?P<path>[^`]+)`", re.DOTALL)
_WRONG_TYPE = re.compile(r"Expected `(?P<types>[^`]+)`, got `(?P<got>\w+)` - at `\$(?P<path>[^`]+)`")
_MISSING = re.compile(r"Object missing required field `(?P<key>\w+)`(?: - at `\$(?P<path>[^`]+)`)?")
_OUT_OF_RANGE = re.compile(r"Expected `(?:int|float)` [<>]=? \S+ - at `\$(?P<path>[^`]+)`")
_TOO_LARGE = re.compile(r"Number out of range - at `\$(?P<path>[^`]+)`")
# A step of a path to a value, as msgspec writes it: a key, an index, or any key of a dictionary.
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")

# Words for the types of JSON, by msgspec's names.
_WORDS = {
    "int": ("a whole number",),
    "float": ("a number",),
    "str": ("text",),
    "bool": ("true", "false"),
    "array": ("a list",),
    "object": ("an object",),
    "null": ("null",),
}

_Settings = TypeVar("_Settings", bound=msgspec.Struct)


def parse_settings(
    where: str, given: Mapping[str, Any], settings: type[_Settings], beside: Sequence[str] = ()
) -> _Settings:
    """Convert an object of the configuration, with all objects inside it, to a class of settings.

    Keys in `beside` may be there too, and are left out.

    Raises:
        ConfigError: a key is unknown or missing, or a value has a wrong type or is none of the allowed ones.
    """
    _check_all_keys(where, given, settings, beside)
    plain = {key: value for key, value in given.items() if key not in beside}
    try:
        return msgspec.convert(plain, settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}{_conversion_error(str(error), plain, settings)}") from error


def check_keys(where: str, settings: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ConfigError for an unknown key. The message names the most similar known key, or all of them."""
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{where} has no key {key!r}; {hint}")


def check_text(where: str, value: Any) -> None:
    r"""Raise ConfigError for a string that UTF-8 cannot encode, such as a lone surrogate (``"\ud800"``)."""
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
        inner, value = _struct_in(field.type), given.get(field.name)
        if inner is not None and isinstance(value, Mapping):
            _check_all_keys(field.name, value, inner)


def _conversion_error(error: str, given: Mapping[str, Any], settings: type[msgspec.Struct]) -> str:
    """Return the end of a message that begins with the name of an object of the configuration.

    >>> class Settings(msgspec.Struct):
    ...     port: int
    >>> _conversion_error("Expected `int`, got `bool` - at `$.port`", {"port": True}, Settings)
    ': port is true; it must be a whole number'
    """
    if found := _MISSING.fullmatch(error):
        inside = (found["path"] or "").removeprefix(".")
        of = _field(settings, f"{found['path'] or ''}.{found['key']}").type
        kind = getattr(get_args(of)[0] if get_origin(of) is Annotated else of, "__name__", "")
        needed = f" to {_listed(_WORDS[kind])}" if kind in _WORDS else ""
        place = f": {inside}" if inside else ""
        return f"{place} lacks the key {found['key']!r}, which is required; set it{needed}"
    if found := _NO_CHOICE.fullmatch(error):
        name, value = _locate(given, found["path"])
        field = _field(settings, found["path"])
        return f": {name} is {_shown(value, field)}; it must be one of {', '.join(_choices(field.type))}"
    if found := _WRONG_TYPE.fullmatch(error):
        name, value = _locate(given, found["path"], found["got"])
        field = _field(settings, found["path"])
        choices = [*_choices(field.type)]
        types = [word for kind in found["types"].split(" | ") for word in _WORDS.get(kind, (kind,))]
        wanted = f"one of {', '.join(choices)}" if choices else _listed(types)
        absent = ", or left out" if value is None and not field.required else ""
        return f": {name} is {_shown(value, field)}; it must be {wanted}{absent}"
    if found := _OUT_OF_RANGE.fullmatch(error):
        name, value = _locate(given, found["path"])
        field = _field(settings, found["path"])
        return f": {name} is {_shown(value, field)}; it must be {_range(field.type)}"
    if found := _TOO_LARGE.fullmatch(error):
        return f": {_locate(given, found['path'])[0]} is a number of too many digits; write a smaller one"
    return f": {error}"


def _locate(given: Any, path: str, kind: str = "") -> tuple[str, Any]:
    name, value = "", given
    for step in _STEP.finditer(path):
        key, index = step.groups()
        if index:
            name, value = f"{name}[{index}]", value[int(index)]
            continue
        if key is None:
            key = next((key for key, one in value.items() if _kind(one) == kind), next(iter(value)))
        name, value = f"{name}.{key}".removeprefix("."), value[key]
    return name, value


def _field(settings: type[msgspec.Struct], path: str) -> msgspec.structs.FieldInfo:
    """Return the field that holds the value at a path, or the list or dictionary with this value."""
    first, *rest = (step[1] for step in _STEP.finditer(path) if step[1])
    field = next(one for one in msgspec.structs.fields(settings) if one.name == first)
    inner = _struct_in(field.type)
    return field if inner is None or not rest else _field(inner, "".join(f".{key}" for key in rest))


def _struct_in(of: Any) -> type[msgspec.Struct] | None:
    """Return the class of settings in a type; None if it has none."""
    classes = (one for one in (of, *get_args(of)) if isinstance(one, type))
    return next((one for one in classes if issubclass(one, msgspec.Struct)), None)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "object"
    return "array" if isinstance(value, list | tuple) else type(value).__name__


def _shown(value: Any, field: msgspec.structs.FieldInfo) -> str:
    """Return a value as configured. A list, object or long number is named by its type."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, Mapping | list | tuple) and get_origin(field.type) is not dict:
        try:
            return shown(repr(value) if isinstance(value, str) else json.dumps(value))
        except (TypeError, ValueError):  # no JSON, or a number of thousands of digits
            pass
    return _listed(_WORDS.get(_kind(value), (type(value).__name__,)))


def _listed(words: Sequence[str]) -> str:
    """Join words as a sentence does.

    >>> _listed(["true", "false", "null"])
    'true, false or null'
    """
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _choices(of: Any) -> Iterator[str]:
    for each in get_args(of):
        if isinstance(each, str):
            yield each
        else:
            yield from _choices(each)


def _range(of: Any) -> str:
    """Return the range of a number, such as ``1 to 16`` or ``above 0 and below 86400``."""
    # Of `X | None`, the bounds are those of X.
    meta = next(
        one for each in (of, *get_args(of)) for one in get_args(each) if isinstance(one, msgspec.Meta)
    )
    if meta.ge is not None and meta.le is not None:
        return f"{meta.ge} to {meta.le}"
    words = {"at least": meta.ge, "above": meta.gt, "at most": meta.le, "below": meta.lt}
    return " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)
