"""The file of settings that `kvferry init` writes, and that `kvferry config` and `kvferry serve` read."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from kvferry.tools.cli.options import option
from kvferry.errors import ConfigError


def settings_option() -> Any:
    """Return a field for the option ``--settings``."""
    return option(
        None, "FILE", "Settings to read, as `kvferry init` writes them; options go first.", "--settings"
    )


def read_settings(path: str | None) -> dict[str, Any]:
    """Return the connector's settings from a file, by their names in `ConnectorConfig`. They are not checked.

    Args:
        path: path of a TOML file; None for no settings.

    Raises:
        ConfigError: the file cannot be read, or is no TOML.
    """
    from kvferry.tools.serving.kv_config import parse_admin, parse_tiers

    if path is None:
        return {}
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"cannot read {path}: {reason}; `kvferry init FILE` writes such a file") from error
    except ValueError as error:  # not TOML, or not UTF-8
        # tomllib has the line in its message only.
        at = re.search(r"at line (\d+)", str(error))
        where = f"line {at[1]} of {path}" if at else path
        raise ConfigError(
            f"{where} is no TOML; write a setting as in port = 5600, and text in quotation marks"
        ) from error
    # `kvferry init` writes these as JSON in a string, because the options of `config` take JSON.
    for key, parse in (("tiers", parse_tiers), ("admin", parse_admin)):
        if isinstance(found.get(key), str):
            found[key] = parse(found[key])
    return found
