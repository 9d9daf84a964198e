"""The value of vLLM's ``--kv-transfer-config`` that loads kvferry's connector."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvferry.common.errors import ConfigError
from kvferry.common.files import expanded
from kvferry.connector import DEFAULT, ConnectorConfig, parse_config, tier_settings
from kvferry.engines.vllm import TransferCheck
from kvferry.tools.serving.machine import check_machine
from kvferry.tools.serving.role import Role

_VLLM_ROLE = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}
_MARK = "  # default"
_LONGEST_SHOWN = 200
_JSON_EXAMPLES = {
    "tiers": 'default, or a list such as [{"type": "host", "capacity": "8GiB"}]',
    "tenants": 'an object such as {"acme": {"adapter": "acme", "weight": 2}}',
    "admin": 'an object such as {"port": 5700}',
    "other_connectors": 'a list such as [{"kv_connector": "NixlConnector"}]',
}


def kv_transfer_config(
    role: Role, settings: Mapping[str, Any] | None = None, *, alone: bool = True, machine: bool = True
) -> dict[str, Any]:
    """Check an engine's settings as the engine does at its start, and return its ``--kv-transfer-config``.

    Args:
        settings: settings of the connector, by their names in `ConnectorConfig`. A setting whose value is
            None has its default value.
        alone: True if kvferry's connector is the engine's only connector. With the role PREFILL or DECODE, it
            must then exchange KV with other engines. So `settings` must not set ``transfer`` to false. If
            they set ``tiers``, the result sets ``transfer`` to true.
        machine: True if the engine will run on this machine, to check the files, directories and memory too.

    Raises:
        ConfigError: a key is unknown, a value is not valid, settings contradict each other or the role, or
            the engine could not use a file, a directory or the memory that they name.
    """
    extra = {key: value for key, value in (settings or {}).items() if value is not None}
    config = parse_config(extra, _VLLM_ROLE[role] if alone else None)
    if config.transfer and config.tiers:
        extra["transfer"] = True
    if machine:
        check_machine(config)
    # The engine may start in another folder.
    extra = _with_absolute_paths(extra)
    result = {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.engines.vllm.connector",
        "kv_role": _VLLM_ROLE[role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return _checked(result) if alone else result


def _with_absolute_paths(extra: Mapping[str, Any]) -> dict[str, Any]:
    absolute = dict(extra)
    for key in ("secret_file", "transfer_log", "record", "costs"):
        if key in absolute:
            path = expanded(absolute[key]) if key == "costs" else Path(absolute[key])
            absolute[key] = str(path.absolute())
    if isinstance(tiers := absolute.get("tiers"), list):
        absolute["tiers"] = [
            {**tier, **({"path": str(Path(tier["path"]).absolute())} if tier.get("path") else {})}
            for tier in tiers
        ]
    return absolute


def with_other_connectors(config: Mapping[str, Any], others: Any) -> dict[str, Any]:
    """Return a ``--kv-transfer-config`` object that combines other connectors with kvferry's.

    Args:
        config: result of `kv_transfer_config`. Its ``source_policy`` and ``patience_seconds`` apply to all
            connectors.
        others: list of the other connectors, in the format of vLLM's MultiConnector: one
            ``--kv-transfer-config`` object per connector.

    Raises:
        ConfigError: `others` is not a list, or an entry is not valid.
    """
    extra = config["kv_connector_extra_config"]
    own = {
        key: config[key] for key in ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")
    }
    shared = {key: extra[key] for key in ("source_policy", "patience_seconds") if key in extra}
    given = [*others, own] if isinstance(others, list) else others
    return _checked(
        {
            **config,
            "kv_connector": "FerryMultiConnector",
            "kv_connector_module_path": "kvferry.engines.vllm.multi.connector",
            "kv_connector_extra_config": {"connectors": given, **shared},
        }
    )


def _checked(config: dict[str, Any]) -> dict[str, Any]:
    TransferCheck(config).raise_refusal()
    return config


def parse_json(name: str, text: str | None) -> Any:
    """Parse a setting that is written as JSON. Its content is not checked.

    Args:
        name: ``tiers``, ``admin`` or ``other_connectors``. The text of ``tiers`` may also be ``default``.

    Raises:
        ConfigError: the text is not JSON.
    """
    if text is None or (name == "tiers" and text == "default"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        # Python's message about a number of over 4300 digits is advice for programs.
        is_number = isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError)
        reason = "a number has too many digits" if is_number else error
        short = reprlib.Repr()
        short.maxstring = _LONGEST_SHOWN
        raise ConfigError(
            f"{name} is {short.repr(text)}, which is no JSON ({reason}); write {_JSON_EXAMPLES[name]}"
        ) from error


def kv_transfer_json(config: Mapping[str, Any]) -> str:
    """Return a ``--kv-transfer-config`` object as one line of JSON."""
    return json.dumps(config, separators=(",", ":"))


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
