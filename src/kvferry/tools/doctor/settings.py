"""Check the configuration file of ``--config`` in the way that the connector reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.connector.config import ConnectorConfig
from kvferry.tools.doctor.finding import Finding, from_error, note, ok
from kvferry.engines.vllm.transfer_config import TransferCheck, Verdict
from kvferry.errors import ConfigError

# Far more than any configuration has.
_MOST_BYTES = 1 << 20
_FINDINGS: Mapping[Verdict, Callable[[str, str], Finding]] = {
    Verdict.ACCEPTED: ok,
    Verdict.NOTED: lambda where, text: note(where, *text.split("; ", 1)),
    Verdict.REFUSED: lambda where, text: from_error(where, ConfigError(text)),
}


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
    """Read and check a value of ``--kv-transfer-config``, or only its part ``kv_connector_extra_config``.

    Raises:
        ConfigError: the file cannot be read, or is not a JSON object.
    """
    checked = TransferCheck(_load_json(path))
    found = [_FINDINGS[one.verdict](one.where, one.text) for one in checked.remarks]
    return ConfigFile(tuple(checked.configs), tuple(found))


def _load_json(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MOST_BYTES + 1)  # never all of a device or of a checkpoint
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
