"""docs/settings.md has every setting of the connector, as the docstrings of the config classes describe it.

`PYTHONPATH=src:tests python tests/unit/test_settings_page.py` writes the page.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import msgspec

from kvferry.connector.config import AdminConfig, ConnectorConfig
from kvferry.tiers.host.settings import HostSettings
from kvferry.tiers.registry import STORAGE_TIERS

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
HEAD = """# Settings

Reference: every key of `kv_connector_extra_config`, and of each tier in `tiers`.
`tests/unit/test_settings_page.py` writes this page from the docstrings of the config classes. A unit is part
of a name: `_seconds`, `_tokens`, `_mib`. `kvferry config` has an option for each key of the connector, and
`kvferry config --show-defaults` prints all keys with their values.
"""
ATTRIBUTE = re.compile(r"^([a-z_]+): (.*)$")


def meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the description of each attribute in the docstrings of a class and its bases, by name."""
    found: dict[str, str] = {}
    for one in (base for base in reversed(kind.__mro__) if base.__doc__ and issubclass(base, msgspec.Struct)):
        name = ""
        for line in inspect.cleandoc(one.__doc__).partition("Attributes:\n")[2].splitlines():
            if head := ATTRIBUTE.match(line[4:]):
                name, found[name] = head[1], head[2]
            elif name and line.strip():
                found[name] += f" {line.strip()}"
    return found


def table(title: str, kind: type[msgspec.Struct]) -> str:
    """Return the section of one config class."""
    said = meanings(kind)
    lines = [f"\n## {title}\n", "| key | type | default | meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        of = inspect.formatannotation(field.type).replace("typing.", "").replace("|", "or")
        of = re.sub(r"kvferry\.[\w.]+", "object", of)
        default = "required" if field.required else f"`{json.dumps(default_of(field))}`"
        meaning = said[field.name].replace("|", "\\|").replace("``", "`")
        meaning = re.sub(r"(?<!`)`([a-z_]+\.[a-z_.]+)`", r"\1", meaning)
        lines.append(f"| `{field.name}` | {of} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def default_of(field: msgspec.structs.FieldInfo) -> object:
    """Return the value of a setting that is not given."""
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def page() -> str:
    """Return the page, from the config classes."""
    tiers = {HostSettings.kind: HostSettings, **STORAGE_TIERS}
    sections = [table("Connector", ConnectorConfig), table("The object `admin`", AdminConfig)]
    sections += [table(f'Tier with "type": "{kind}"', one) for kind, one in tiers.items()]
    return HEAD + "".join(sections)


def test_the_page_says_what_the_config_classes_say() -> None:
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
