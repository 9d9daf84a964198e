"""Check the configuration file of ``--config`` in the way that the connector reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from kvferry.connector.config import ConnectorConfig, parse_config
from kvferry.doctor.finding import Finding, bad, from_error, note, ok
from kvferry.engines.vllm import plugin
from kvferry.engines.vllm.multi.settings import INHERITED, parse_multi
from kvferry.engines.vllm.plugin import CONNECTORS
from kvferry.errors import ConfigError

_OURS = "KVFerryConnector"
_MULTI = "FerryMultiConnector"
_PLUGINS = "vllm.general_plugins"
_MOST_BYTES = 1 << 20
_ROLES = ("kv_producer", "kv_consumer", "kv_both")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The settings of kvferry's connectors in a configuration file.

    Attributes:
        configs: settings of each `KVFerryConnector` in the file; those with invalid settings are left out.
        findings: findings about the file.
    """

    configs: tuple[ConnectorConfig, ...]
    findings: tuple[Finding, ...]


def read_file(path: str) -> ConfigFile:
    """Read and check a configuration file.

    The file contains a value of ``--kv-transfer-config``, or only its part ``kv_connector_extra_config``.

    Args:
        path: path of the file.

    Raises:
        ConfigError: the file cannot be read, or is not a JSON object.
    """
    given = _load_json(path)
    if "kv_connector" in given:
        return _read_transfer_config(given)
    config, found = _read_extra_config(given, None)
    return ConfigFile(config, found)


def _load_json(path: str) -> dict[str, Any]:
    """Return the JSON object in a configuration file of at most 1 MiB.

    Raises:
        ConfigError: the file cannot be read, is too large, or is not a JSON object.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ConfigError(f"--config {path}: {why}; name the file with the settings") from error
    if len(text) > _MOST_BYTES:
        raise ConfigError(
            f"--config {path} is larger than 1 MiB, so it is no configuration; name another file"
        )
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--config {path} is not JSON ({error}); `kvferry config` prints a configuration"
        ) from error
    if not isinstance(given, dict):
        raise ConfigError(
            f"--config {path} holds a JSON {type(given).__name__}; it must be an object, as "
            "`kvferry config` prints it"
        )
    return given


def _read_transfer_config(given: Mapping[str, Any], *, compare_role: bool = True) -> ConfigFile:
    """Read and check the settings of every `KVFerryConnector` in a value of ``--kv-transfer-config``.

    Other connectors are not checked.

    Args:
        given: value of ``--kv-transfer-config``. It must have the key ``kv_connector``.
        compare_role: True to check that the connector's settings agree with ``kv_role``; False for a
            connector inside a `FerryMultiConnector`.
    """
    name = given["kv_connector"]
    if not isinstance(name, str):
        return ConfigFile((), (bad("settings", f"kv_connector is {name!r}", f'set it to "{_OURS}"'),))
    extra = given.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        return ConfigFile(
            (), (bad("settings", f"kv_connector_extra_config is {extra!r}", "make it an object"),)
        )
    if name == _OURS:
        role = given.get("kv_role")
        config, found = _read_extra_config(extra, role if compare_role and isinstance(role, str) else None)
        return ConfigFile(config, (*_check_outer_keys(given), *found))
    children = extra.get("connectors")
    inner = [each for each in children if isinstance(each, dict)] if isinstance(children, list) else []
    findings = list[Finding]()
    if name == _MULTI:
        findings += _check_multi(given, extra)
        handed_on = {key: given[key] for key in INHERITED if key in given}
        inner = [{**handed_on, **each} for each in inner]
    ours = [each for each in inner if each.get("kv_connector") == _OURS]
    if not ours and name == _MULTI:
        return ConfigFile((), tuple(findings))
    if not ours:
        return ConfigFile(
            (),
            (note("settings", f"kv_connector is {name!r}, which is not kvferry's; it is not checked"),),
        )
    configs = list[ConnectorConfig]()
    findings.append(note("settings", f"{_OURS} inside {name}; other connectors are not checked"))
    for number, each in enumerate(ours):
        read = _read_transfer_config(each, compare_role=name != _MULTI)
        configs += read.configs
        subject = "settings" if len(ours) == 1 else f"settings ({number + 1})"
        findings += [Finding(subject, one.state, one.found, one.advice) for one in read.findings]
    return ConfigFile(tuple(configs), tuple(findings))


def _check_multi(given: Mapping[str, Any], extra: Mapping[str, Any]) -> list[Finding]:
    """Check the settings of a `FerryMultiConnector`, but not those of the connectors inside it.

    Args:
        given: value of ``--kv-transfer-config``.
        extra: value of its ``kv_connector_extra_config``.
    """
    try:
        settings = parse_multi(extra)
    except ConfigError as error:
        return [*_check_outer_keys(given), from_error("settings", error)]
    names = ", ".join(child.name for child in settings.children)
    return [
        *_check_outer_keys(given),
        ok("settings", f"{_MULTI} over {names}, policy {settings.source_policy}"),
    ]


def _check_outer_keys(given: Mapping[str, Any]) -> list[Finding]:
    """Check the keys ``kv_connector_module_path``, ``kv_load_failure_policy`` and ``kv_role``.

    Args:
        given: value of ``--kv-transfer-config``, whose connector is one of kvferry's.
    """
    found = []
    name = given["kv_connector"]
    expected, module = CONNECTORS[name], given.get("kv_connector_module_path")
    if module != expected and not (module is None and _is_plugin_loaded()):
        found.append(
            bad(
                "kv_connector_module_path",
                f"is {module!r}: vLLM does not find {name}" if module is None else f"is {module!r}",
                f'set it to "{expected}"',
            )
        )
    if (policy := given.get("kv_load_failure_policy", "fail")) != "recompute":
        found.append(
            bad(
                "kv_load_failure_policy",
                f"is {policy!r}: a request whose load fails would fail too, so the engine does not start",
                'set it to "recompute"',
            )
        )
    if (role := given.get("kv_role")) not in _ROLES:
        found.append(bad("kv_role", f"is {role!r}", f"set it to one of {', '.join(_ROLES)}"))
    return found


def _is_plugin_loaded() -> bool:
    """Return True if vLLM loads kvferry's plugin, which lets vLLM find the connectors by name."""
    allowed = os.environ.get("VLLM_PLUGINS")
    ours = [one.name for one in entry_points(group=_PLUGINS) if one.module == plugin.__name__]
    return any(allowed is None or name in allowed.split(",") for name in ours)


def _read_extra_config(
    extra: Mapping[str, Any], kv_role: str | None
) -> tuple[tuple[ConnectorConfig, ...], tuple[Finding, ...]]:
    try:
        config = parse_config(extra, kv_role)
    except ConfigError as error:
        return (), (from_error("settings", error),)
    return (config,), (ok("settings", f"the connector accepts all {len(extra)} keys: {summary(config)}"),)


def summary(config: ConnectorConfig) -> str:
    """Return a short text for users: whether an engine exchanges KV, and the tiers in which it keeps KV."""
    does = ["exchanges KV with other engines"] if config.transfers else []
    if config.tiers:
        kinds = "host, file" if config.tiers == "default" else ", ".join(one["type"] for one in config.tiers)
        does.append(f"keeps it in tiers ({kinds})")
    return " and ".join(does)
