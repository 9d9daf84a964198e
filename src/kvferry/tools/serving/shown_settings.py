"""Show the complete settings of a connector, with a mark at each default."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvferry.connector.config import ConnectorConfig, parse_config
from kvferry.connector.tier_config import DEFAULT, tier_settings

_MARK = "  # default"


def complete_settings(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line per setting: ``key = JSON value``, with a comment if the value is the default.

    The keys of a tier have a prefix such as ``tiers[0].``. A ``null`` stands for a value that the engine
    chooses at its start.
    """
    extra = config["kv_connector_extra_config"]
    parsed = parse_config(extra, config["kv_role"])
    for key, value in config.items():
        if key != "kv_connector_extra_config":
            yield _line(key, value)
    for field in msgspec.structs.fields(ConnectorConfig):
        # The default of this setting depends on others, and this is its value here.
        value = parsed.transfers if field.name == "transfer" else getattr(parsed, field.name)
        if field.name == "tiers" and parsed.tiers:
            yield from _tiers(parsed.tiers)
        else:
            yield _line(field.name, value, default=field.name not in extra)


def _tiers(value: str | Sequence[Mapping[str, Any]]) -> Iterator[str]:
    given = [{"type": tier.kind} for tier in DEFAULT] if isinstance(value, str) else value
    for number, (keys, settings) in enumerate(zip(given, map(tier_settings, given), strict=True)):
        yield _line(f"tiers[{number}].type", settings.kind)
        for field in msgspec.structs.fields(type(settings)):
            default = field.name not in keys
            yield _line(f"tiers[{number}].{field.name}", getattr(settings, field.name), default=default)


def _line(key: str, value: Any, *, default: bool = False) -> str:
    return f"{key} = {json.dumps(msgspec.to_builtins(value))}{_MARK if default else ''}"
