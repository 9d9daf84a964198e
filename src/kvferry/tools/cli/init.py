"""`kvferry init`: write all settings of the connector to a file, with what they mean."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from kvferry.tools.cli.config import SETTINGS, ConfigOptions
from kvferry.tools.cli.options import TYPER, argument, command, writing
from kvferry.errors import ConfigError
from kvferry.terminal import wrap

_COLUMNS = 100
_HEAD = """\
# Settings of kvferry's connector. Remove the # before a setting to change it. A value in capitals stands for
# one that the engine chooses. Relative paths begin in the folder where the command is run.
#   kvferry serve MODEL --settings FILE
#   vllm serve MODEL --kv-transfer-config "$(kvferry config --settings FILE)"
"""


@dataclass(frozen=True)
class InitOptions:
    """The options of `kvferry init`."""

    file: str = argument("FILE", "File to create; - for standard output.", "kvferry.toml")


@command
def init(options: InitOptions) -> None:
    """Write a file with all settings, for --settings of serve and config.

    Every setting is in a comment, with its meaning and its default. An existing file is never overwritten.
    """
    text = settings_text()
    if options.file == "-":
        print(text, end="")
        return
    file = Path(options.file)
    with writing(file):
        # Opened exclusively: a test before it could not see a file that is created meanwhile.
        try:
            created = file.open("x", encoding="utf-8")
        except FileExistsError as error:
            raise ConfigError(
                f"{file} exists and is not overwritten; name another file, or remove it"
            ) from error
        with created:
            created.write(text)
    print(f"{file}: {len(SETTINGS)} settings, all with their defaults")


def settings_text() -> str:
    """Return the content of the file: the settings of `kvferry config`, each in a comment."""
    from kvferry.connector.config import ConnectorConfig

    defaults, types = ConnectorConfig(), get_type_hints(ConfigOptions)
    return _HEAD + "".join(
        "\n"
        + "".join(f"# {line}\n" for line in wrap(how.help, _COLUMNS - len("# ")))
        + f"#{one.name} = {_value(types[one.name], how.metavar, getattr(defaults, one.name))}\n"
        for one in SETTINGS
        for how in (one.metadata[TYPER],)
    )


def _value(kind: Any, metavar: str | None, default: Any) -> str:
    """Return the default of a setting in TOML, or what stands for its value if the engine chooses it."""
    if default is not None:
        return json.dumps(default)
    if kind == bool | None:
        return "TRUE OR FALSE"
    if kind in (int | None, float | None):
        return str(metavar)
    return json.dumps([metavar] if kind == list[str] | None else metavar)
