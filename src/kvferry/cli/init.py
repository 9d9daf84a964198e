"""`kvferry init`: write all settings of the connector to a file, with what they mean."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from kvferry.cli.config import SETTINGS
from kvferry.errors import ConfigError

_COLUMNS = 100
_HEAD = """\
# Settings of kvferry's connector. Remove the # before a setting to change it. A value in capitals stands for
# one that the engine chooses. Relative paths begin in the folder where the command is run.
#   kvferry serve MODEL --settings FILE
#   vllm serve MODEL --kv-transfer-config "$(kvferry config --settings FILE)"
"""


def init(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="File to create; - for standard output.")
    ] = "kvferry.toml",
) -> None:
    """Write a file with all settings, for --settings of serve and config.

    Every setting is in a comment, with its meaning and its default. An existing file is never overwritten.
    """
    text = settings_text()
    if file == "-":
        print(text, end="")
        return
    try:
        with Path(file).open("x", encoding="utf-8") as created:
            created.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{file} exists and is not overwritten; name another file, or remove it") from error
    except OSError as error:
        raise ConfigError(
            f"cannot write {file}: {error.strerror}; name a file that can be written"
        ) from error
    print(f"{file}: {len(SETTINGS)} settings, all with their defaults")


def settings_text() -> str:
    """Return the content of the file: the settings of `kvferry config`, each in a comment."""
    from kvferry.connector.config import ConnectorConfig

    defaults = ConnectorConfig()
    return _HEAD + "".join(
        f"\n{textwrap.fill(text, _COLUMNS, initial_indent='# ', subsequent_indent='# ')}\n"
        f"#{name} = {_value(kind, metavar, getattr(defaults, name))}\n"
        for name, (kind, metavar, text) in SETTINGS.items()
    )


def _value(kind: Any, metavar: str | None, default: Any) -> str:
    """Return the default of a setting in TOML, or what stands for its value if the engine chooses it."""
    if default is not None:
        return json.dumps(default)
    if kind is bool:
        return "TRUE OR FALSE"
    if kind in (int, float):
        return str(metavar)
    return json.dumps([metavar] if kind == list[str] else metavar)
