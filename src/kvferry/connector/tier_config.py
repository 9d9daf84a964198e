"""The settings of the tiers: the ``tiers`` list of the connector's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from kvferry.connector.choices import check_keys, check_text, unusable
from kvferry.errors import ConfigError
from kvferry.tiers.index.key_table import MAX_TIERS
from kvferry.tiers.names import FILE, HOST, OBJECT
from kvferry.tiers.sizes import parse_size

Write = Literal["through", "back"]


class HostSettings(msgspec.Struct, frozen=True, tag=HOST, forbid_unknown_fields=True):
    """Chunks in host memory, shared by the ranks of the engine. Every chunk passes it.

    Attributes:
        capacity: bytes, or a text such as ``4GiB``; by default a tenth of the memory that is available.
        eviction_policy: which chunk is evicted when the memory is full.
        load_weight: of what comes from here, where sources are chosen by weight.
    """

    capacity: int | str | None = None
    eviction_policy: Literal["lru", "arc", "s3fifo"] = "lru"
    load_weight: float = 1.0


class FileSettings(msgspec.Struct, frozen=True, tag=FILE, forbid_unknown_fields=True):
    """Chunks in a directory, which several engines may share.

    Attributes:
        path: of the directory, which must be there; by default one in the user's cache directory.
        capacity: bytes of all its files, or a text such as ``50GiB``; by default what the directory was set
            to before, or a tenth of the free space.
        durable: flush every chunk to the disk before it counts as stored.
        write: ``through``, as soon as a chunk is stored, or ``back``, when host memory fills up.
        load_weight: as of host memory.
    """

    path: str | None = None
    capacity: int | str | None = None
    durable: bool = False
    write: Write = "through"
    load_weight: float = 1.0


class ObjectSettings(msgspec.Struct, frozen=True, tag=OBJECT, forbid_unknown_fields=True):
    """Chunks in object storage, which several engines may share.

    Attributes:
        url: such as ``s3://bucket/prefix``.
        options: of the store, by the names that obstore gives them; credentials come from the environment.
        timeout_seconds: of one chunk, stored or fetched.
        write, load_weight: as of a file tier.
    """

    url: str
    options: dict[str, str] = {}
    timeout_seconds: float = 20.0
    write: Write = "through"
    load_weight: float = 1.0


TierSettings: TypeAlias = HostSettings | FileSettings | ObjectSettings
SlowSettings: TypeAlias = FileSettings | ObjectSettings

DEFAULT: tuple[TierSettings, ...] = (HostSettings(), FileSettings())
"""What ``"tiers": "default"`` means."""


class Tiers(msgspec.Struct, frozen=True):
    """What was configured, the fastest first.

    Attributes:
        host: host memory, configured or not: every chunk passes it.
        slow: what is behind it.
    """

    STAGING: ClassVar[int] = 256 << 20
    """Bytes of host memory where none is configured."""

    host: HostSettings
    slow: tuple[SlowSettings, ...]


def read_tiers(given: Any) -> Tiers | None:
    """Return the tiers of a configuration, None if it has none.

    Args:
        given: the value of ``tiers``: None, ``"default"`` or a list of objects.

    Raises:
        ConfigError: an unknown kind or key (with the nearest known one), a wrong type, a value out of range.
    """
    if given is None or given == []:
        return None
    if given == "default":
        return _checked(DEFAULT)
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f'tiers is {given!r}; it must be "default" or a list of objects with a "type"')
    return _checked([_read(number, one) for number, one in enumerate(given)])


def _read(number: int, given: Any) -> TierSettings:
    where = f"tiers[{number}]"
    kinds: dict[str, type[TierSettings]] = {
        HOST: HostSettings, FILE: FileSettings, OBJECT: ObjectSettings
    }  # fmt: skip
    if not isinstance(given, Mapping) or given.get("type") not in list(kinds):
        raise ConfigError(
            f'{where} is {given!r}; it must be an object whose "type" is one of {", ".join(kinds)}'
        )
    known = ["type", *(field.name for field in msgspec.structs.fields(kinds[given["type"]]))]
    check_keys(f"{where} ({given['type']})", given, known)
    for key in given:
        if key != "path":  # a directory may have a name that is no text
            check_text(f"{where}: {key}", given[key])
    try:
        read: TierSettings = msgspec.convert(dict(given), HostSettings | FileSettings | ObjectSettings)
    except msgspec.ValidationError as error:
        raise unusable(f"{where} ({given['type']})", error, kinds[given["type"]]) from error
    return read


def _checked(tiers: Sequence[TierSettings]) -> Tiers:
    hosts = [one for one in tiers if isinstance(one, HostSettings)]
    slow = tuple(one for one in tiers if not isinstance(one, HostSettings))
    if len(hosts) > 1:
        raise ConfigError("tiers names host memory twice; give it once, with the capacity of both")
    if hosts and tiers[0] is not hosts[0]:
        raise ConfigError("tiers: host memory comes first, since every chunk passes it")
    if len(slow) >= MAX_TIERS:
        raise ConfigError(
            f"tiers names {len(slow)} tiers behind host memory; leave out some, it may name {MAX_TIERS - 1}"
        )
    for number, one in enumerate(tiers):
        check_weight(f"tiers[{number}]: load_weight", one.load_weight)
        capacity = None if isinstance(one, ObjectSettings) else one.capacity
        if capacity is not None and parse_size(capacity) <= 0:
            raise ConfigError(f"tiers: a capacity of {capacity!r}; it must be above 0")
        if isinstance(one, ObjectSettings) and not 0 < one.timeout_seconds < 3600:
            raise ConfigError(
                f"tiers: timeout_seconds is {one.timeout_seconds}, it must be above 0 and below an hour"
            )
        if isinstance(one, FileSettings) and one.path is not None:
            _check_path(f"tiers[{number}]: path", one.path)
    _check_apart(tiers)
    return Tiers(hosts[0] if hosts else HostSettings(Tiers.STAGING), slow)


def _check_path(name: str, path: str) -> None:
    """Check that a directory can have that name, whether it exists or not."""
    try:
        usable = path and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise ConfigError(f"{name} is {path!r}; name a directory, or leave it out for the default one")


def _check_apart(tiers: Sequence[TierSettings]) -> None:
    """Check that no two tiers name one place, where each chunk would be looked for twice."""
    taken: dict[tuple[str, ...], int] = {}
    for number, one in enumerate(tiers):
        if isinstance(one, HostSettings):
            continue
        what, place = _place(one)
        if place in taken:
            raise ConfigError(
                f"tiers[{taken[place]}] and tiers[{number}] are both {what}; name another place, or leave "
                "out one of them"
            )
        taken[place] = number


def _place(one: SlowSettings) -> tuple[str, tuple[str, ...]]:
    """Return where a tier's chunks lie, in words and as a key; other options make a URL another place."""
    if isinstance(one, ObjectSettings):
        url = one.url.rstrip("/")
        return url, (url, *(f"{name}={value}" for name, value in sorted(one.options.items())))
    if one.path is None:
        return "the default directory", ()
    path = os.path.abspath(one.path)  # noqa: PTH100 - as the tier has it
    return path, (path,)


def check_weight(name: str, weight: float) -> None:
    """Check a weight.

    Raises:
        ConfigError: it is below 0, or so large that nothing else would ever be taken.
    """
    if not 0 <= weight <= 1e6:  # a NaN is neither
        raise ConfigError(f"{name} is {weight}, it must be 0 to 1000000")
