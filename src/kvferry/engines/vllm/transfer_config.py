"""A check of vLLM's ``--kv-transfer-config`` without vLLM, for `kvferry config` and `kvferry doctor`.

The connectors check the same settings with the same functions when an engine starts (`config`,
`multi.settings`). This module adds what vLLM checks before it creates a connector.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import entry_points
from typing import Any

from kvferry.common.errors import ConfigError
from kvferry.common.units import counted
from kvferry.connector.config import ConnectorConfig, parse_config
from kvferry.engines.vllm import plugin
from kvferry.engines.vllm.config import (
    TRANSFER_KEYS,
    check_failure_policy,
    gone_keys,
    parse_transfer,
    unused_keys,
)
from kvferry.engines.vllm.multi.settings import HAND_OVER, INHERITED, check_hand_over, parse_multi
from kvferry.engines.vllm.plugin import CONNECTORS

_OURS = "KVFerryConnector"
_MULTI = "FerryMultiConnector"
_VLLMS_MULTI = "MultiConnector"
_WITH_HANDSHAKE = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", _OURS)
"""Connectors that hand their scheduler a handshake of their workers."""

_OUTER = ("kv_transfer_config", "kv-transfer-config", "--kv-transfer-config")
_OFFLOADING = ("OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheMPConnector")
"""Connectors by which vLLM's ``--kv-offloading-size`` replaces the configured one."""

_EXTRA = "kv_connector_extra_config"
_PLUGINS = "vllm.general_plugins"
_SIMILAR = 0.85


class Verdict(StrEnum):
    """The verdict on a part of a configuration. NOTED means that it has no effect, or is not checked."""

    ACCEPTED = "accepted"
    NOTED = "noted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Remark:
    """A remark on a part of a configuration."""

    where: str
    verdict: Verdict
    text: str  # what was found, and, after a semicolon, what to do


class TransferCheck:
    """A check of a value of ``--kv-transfer-config``, as an engine does it at its start.

    Attributes:
        configs: valid settings of each `KVFerryConnector`. Other connectors are not checked.
        remarks: remarks in the order of the checks.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        """Check a value of ``--kv-transfer-config``, or only its part ``kv_connector_extra_config``."""
        self.configs: list[ConnectorConfig] = []
        self.remarks: list[Remark] = []
        if any(key in given for key in (*TRANSFER_KEYS, *_OUTER)):
            self._check(given, "settings")
        else:
            self._check_extra(given, "settings", None)

    def raise_refusal(self) -> None:
        """Raise a ConfigError with the first reason why an engine refuses the configuration, if any."""
        for remark in self.remarks:
            if remark.verdict is Verdict.REFUSED:
                raise ConfigError(remark.text)

    def _check(self, given: Mapping[str, Any], where: str, parent: str | None = None) -> None:
        """Check an object that names a connector. `parent` is the connector that contains it, if any."""
        for outer in _OUTER:
            if isinstance(inner := given.get(outer), Mapping):
                self._refuse(
                    where,
                    f"the settings are inside an object with the key {outer!r}; give only what is inside",
                )
                self._check(inner, where)
                return
        name, module = given.get("kv_connector"), given.get("kv_connector_module_path")
        if not isinstance(name, str):
            self._refuse(where, f'kv_connector is {name!r}; set it to "{_OURS}"')
        elif name == _VLLMS_MULTI and module is None:
            self._check_vllms_multi(given, where)
        elif name not in CONNECTORS and module in CONNECTORS.values():
            self._refuse(where, str(wrong_name(name, str(module))))
        elif name not in CONNECTORS and module is None and (near := _similar(name)):
            self._refuse(where, f"kv_connector is {name!r}, which vLLM does not know; did you mean {near!r}?")
        elif name not in CONNECTORS:
            self._note(where, f"kv_connector is {name!r}, which is not kvferry's; it is not checked")
        else:
            self._check_ours(name, given, where, parent)

    def _check_ours(self, name: str, given: Mapping[str, Any], where: str, parent: str | None) -> None:
        self._check_module(name, given.get("kv_connector_module_path"), where, parent)
        with self._refusing(where):
            transfer = parse_transfer(where, given)
            check_failure_policy(transfer.kv_load_failure_policy)
            for text in gone_keys(where, given):
                self._note(where, text)
            if unused := unused_keys(transfer.kv_port):
                self._note(where, unused)
        role, extra = given.get("kv_role"), given.get(_EXTRA, {})
        if not isinstance(extra, Mapping):
            return  # refused above
        if name == _MULTI:
            self._check_multi(given, extra, where)
        else:
            # Children of a FerryMultiConnector share its role, but another child may do the transfers.
            self._check_extra(extra, where, role if parent != _MULTI and isinstance(role, str) else None)

    def _check_module(self, name: str, module: object, where: str, parent: str | None) -> None:
        """Check that vLLM finds one of kvferry's connectors at a ``kv_connector_module_path``."""
        expected = CONNECTORS[name]
        # A FerryMultiConnector registers kvferry's connectors by name.
        if module == expected or (module is None and (parent == _MULTI or _is_plugin_loaded())):
            return
        what = f"is {module!r}" if module is not None else f"is missing, so vLLM does not find {name}"
        self._refuse(where, f'kv_connector_module_path {what}; set it to "{expected}"')

    def _check_extra(self, extra: Mapping[str, Any], where: str, kv_role: str | None) -> None:
        with self._refusing(where):
            config = parse_config(extra, kv_role)
            self.configs.append(config)
            text = f"the connector accepts {counted(len(extra), 'key')}: {summary(config)}"
            self.remarks.append(Remark(where, Verdict.ACCEPTED, text))

    def _check_multi(self, given: Mapping[str, Any], extra: Mapping[str, Any], where: str) -> None:
        """Check the settings of a `FerryMultiConnector`, and its children."""
        inherited = {key: given[key] for key in INHERITED if key in given}
        hand_over = []
        with self._refusing(where):
            settings = parse_multi(extra)
            names = ", ".join(child.name for child in settings.children)
            text = f"{_MULTI} over {names}, policy {settings.source_policy}"
            self.remarks.append(Remark(where, Verdict.ACCEPTED, text))
            for number, child in enumerate(settings.children):
                # The configs of this child are those that its check adds.
                known = len(self.configs)
                transfer = {**inherited, **child.transfer}
                self._check(transfer, f"connectors[{number}] ({child.name})", parent=_MULTI)
                moves = any(config.transfers for config in self.configs[known:])
                if moves or child.transfer["kv_connector"] in HAND_OVER:
                    hand_over.append(child.name)
            check_hand_over(hand_over)

    def _check_vllms_multi(self, given: Mapping[str, Any], where: str) -> None:
        """Check the children of vLLM's `MultiConnector` that are kvferry's."""
        extra = given.get(_EXTRA)
        listed = extra.get("connectors") if isinstance(extra, Mapping) else None
        children = [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []
        self._note(where, f"kv_connector is {_VLLMS_MULTI!r}; only kvferry's connectors in it are checked")
        names = [each.get("kv_connector") for each in children]
        # vLLM collects one handshake per worker: that of the first child that has one.
        first = next((name for name in names if name in _WITH_HANDSHAKE), None)
        checked = False
        for number, child in enumerate(children):
            name, module = child.get("kv_connector"), child.get("kv_connector_module_path")
            if name in [*CONNECTORS] or module in CONNECTORS.values():
                checked = True
                self._check(child, f"connectors[{number}] ({name})", parent=_VLLMS_MULTI)
        if _OURS in names and (first != _OURS or names.count(_OURS) > 1):
            self._refuse(
                where,
                f"{_VLLMS_MULTI} gives all children the handshake of {first}, so another {_OURS} does not "
                f"start; use {_MULTI} (kvferry config --other-connectors)",
            )
        if not checked:
            return
        with self._refusing(where):
            if parse_transfer(where, given).kv_load_failure_policy != "recompute":
                self._note(
                    where,
                    f"kv_load_failure_policy of the {_VLLMS_MULTI} is not 'recompute', so vLLM fails a "
                    "request whose load fails; set it to 'recompute'",
                )

    @contextmanager
    def _refusing(self, where: str) -> Iterator[None]:
        """Turn a ConfigError into a remark."""
        try:
            yield
        except ConfigError as error:
            self._refuse(where, str(error))

    def _refuse(self, where: str, text: str) -> None:
        self.remarks.append(Remark(where, Verdict.REFUSED, text))

    def _note(self, where: str, text: str) -> None:
        self.remarks.append(Remark(where, Verdict.NOTED, text))


def wrong_name(name: object, module: str) -> ConfigError:
    """Return the error for a ``kv_connector`` that a module of kvferry does not have."""
    found = f"kv_connector is {name!r}, which is not in {module}"
    if name in _OFFLOADING:
        return ConfigError(
            f"{found}: --kv-offloading-size replaces the connector by vLLM's own; leave --kv-offloading-size "
            "out and use kvferry's tiers, or combine both with kvferry config --other-connectors"
        )
    right = next(each for each, path in CONNECTORS.items() if path == module)
    return ConfigError(f"{found}; set it to {right!r}")


def summary(config: ConnectorConfig) -> str:
    """Return a short text for users: whether an engine exchanges KV, and the tiers in which it keeps KV."""
    does = ["exchanges KV with other engines"] if config.transfers else []
    if config.tiers:
        kinds = "host, file" if config.tiers == "default" else ", ".join(one["type"] for one in config.tiers)
        does.append(f"keeps it in tiers ({kinds})")
    return " and ".join(does)


def _similar(name: str) -> str | None:
    return next(iter(difflib.get_close_matches(name, CONNECTORS, 1, _SIMILAR)), None)


def _is_plugin_loaded() -> bool:
    # vLLM loads all plugins if the variable is not set.
    allowed = os.environ.get("VLLM_PLUGINS")
    ours = [one.name for one in entry_points(group=_PLUGINS) if one.module == plugin.__name__]
    return any(allowed is None or name in allowed.split(",") for name in ours)
