"""The settings of the tiers: parsing and checks of ``tiers`` in the connector's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec

from kvferry.connector.choices import check_text, parse_settings
from kvferry.errors import ConfigError
from kvferry.tiers.files.settings import FileSettings
from kvferry.tiers.host.settings import HostSettings
from kvferry.tiers.index.key_table import MAX_TIERS
from kvferry.tiers.registry import settings_class, storage_kinds
from kvferry.tiers.storage_settings import StorageSettings

TierSettings: TypeAlias = HostSettings | StorageSettings

DEFAULT: tuple[TierSettings, ...] = (HostSettings(), FileSettings())
"""The tiers for ``"tiers": "default"``: host memory and a directory."""


class Tiers(msgspec.Struct, frozen=True):
    """The settings of all tiers (host memory and slower storage) that keep KV chunks.

    Attributes:
        host: settings of the host memory tier. This tier exists even if it is not configured, because every
            chunk passes through host memory.
        slow: settings of the slower tiers, the fastest first.
    """

    STAGING: ClassVar[int] = 256 << 20
    """Size of host memory in bytes if no host memory tier is configured."""

    host: HostSettings
    slow: tuple[StorageSettings, ...]


def read_tiers(value: Any) -> Tiers | None:
    """Parse and check the configured tiers; return None if there are none.

    Args:
        value: value of the setting ``tiers``: None, ``"default"`` or a list of objects.

    Raises:
        ConfigError: a kind or key is unknown (the message names the nearest known one), a type is wrong, or a
            value is out of range.
    """
    if value is None or value == []:
        return None
    if value == "default":
        return _checked(DEFAULT)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f'tiers is {value!r}; it must be "default" or a list of objects with a "type"')
    return _checked([tier_settings(one, f"tiers[{number}]") for number, one in enumerate(value)])


def tier_settings(value: Any, where: str = "tier") -> TierSettings:
    """Parse the settings of one tier.

    Args:
        value: object in the list ``tiers`` of a configuration.
        where: name of the object in the configuration, for messages.

    Raises:
        ConfigError: the kind or a key is unknown, a type is wrong, or a package's kind cannot be loaded.
    """
    kinds = (HostSettings.kind, *storage_kinds())
    name = value.get("type") if isinstance(value, Mapping) else None
    if name not in kinds:
        known = ", ".join(kinds)
        raise ConfigError(f'{where} is {value!r}; it must be an object whose "type" is one of {known}')
    kind: type[TierSettings] = HostSettings if name == HostSettings.kind else settings_class(name)
    for key, one in value.items():
        if key != "path":  # a directory may have a name that is not valid UTF-8
            check_text(f"{where}: {key}", one)
    return parse_settings(f"{where} ({kind.kind})", value, kind, beside=("type",))


def _checked(tiers: Sequence[TierSettings]) -> Tiers:
    hosts = [one for one in tiers if isinstance(one, HostSettings)]
    slow = tuple(one for one in tiers if not isinstance(one, HostSettings))
    if len(hosts) > 1:
        raise ConfigError("tiers names host memory twice; give it once, with the capacity of both")
    if hosts and tiers[0] is not hosts[0]:
        raise ConfigError(
            "tiers: host memory must come first, because every chunk passes through it; move it to the front"
        )
    if len(slow) >= MAX_TIERS:
        raise ConfigError(
            f"tiers names {len(slow)} tiers besides host memory, at most {MAX_TIERS - 1}; leave some out"
        )
    for number, one in enumerate(tiers):
        check_weight(f"tiers[{number}]: load_weight", one.load_weight)
        one.check(f"tiers[{number}]")
    _check_locations_differ(tiers)
    return Tiers(hosts[0] if hosts else HostSettings(Tiers.STAGING), slow)


def _check_locations_differ(tiers: Sequence[TierSettings]) -> None:
    """Check that no two storage tiers use the same location (such as a directory).

    In a shared location each chunk would be looked up twice.

    Args:
        tiers: settings of all configured tiers. The host memory tier has no location.

    Raises:
        ConfigError: two tiers have the same location.
    """
    taken: dict[tuple[str, tuple[str, ...]], int] = {}
    for number, one in enumerate(tiers):
        if isinstance(one, HostSettings):
            continue
        location = one.location
        key = one.kind, location.key
        if key in taken:
            raise ConfigError(
                f"tiers[{taken[key]}] and tiers[{number}] are both {location.text}; name another "
                "place, or leave out one of them"
            )
        taken[key] = number


def check_weight(name: str, weight: float) -> None:
    """Check that a weight is from 0 to 1000000.

    Args:
        name: name of the setting, for the message.
        weight: the weight.

    Raises:
        ConfigError: the weight is outside this range.
    """
    if not 0 <= weight <= 1e6:  # also refuses NaN
        raise ConfigError(f"{name} is {weight}, it must be 0 to 1000000")
