"""docs/settings.md has every setting of the connector, as the docstrings of the config classes describe it.

Every setting has an example in `support.setting_examples`, which the config classes accept.
`PYTHONPATH=src:tests python tests/unit/test_settings_page.py` writes the page.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.connector.config import AdminConfig, ConnectorConfig, TenantConfig, parse_config
from kvferry.tiers.fleet.settings import FleetSettings
from kvferry.tiers.host.settings import HostSettings
from kvferry.tiers.registry import STORAGE_TIERS
from support.setting_examples import EXAMPLES

TIERS = {one.kind: one for one in (HostSettings, FleetSettings, *STORAGE_TIERS.values())}
KINDS = (ConnectorConfig, TenantConfig, AdminConfig, *TIERS.values())
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "settings.md"
HEADER = "| key | type | default | example | meaning |"
PHONE_WIDTH = 390
HEAD = """# Settings

Reference: every key of `kv_connector_extra_config`, and of each tier in `tiers`.
`tests/unit/test_settings_page.py` writes this page from the docstrings of the config classes. A unit is part
of a name: `_seconds`, `_tokens`, `_mib`. `kvferry config` has an option for each key of the connector, and
`kvferry config --show-defaults` prints all keys with their values. An example is one key of the JSON
object with its value.
"""
BOUNDED = re.compile(r"(?:typing\.)?Annotated\[(int|float), msgspec\.Meta\((.*?)\)\]")
OPERATORS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
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


def bounded_text(annotation: re.Match[str]) -> str:
    """Return the type of a number with its bounds, from the annotation."""
    bounds = (bound.split("=") for bound in annotation[2].split(", "))
    return f"{annotation[1]} {', '.join(f'{OPERATORS[name]} {value}' for name, value in bounds)}"


def table(title: str, kind: type[msgspec.Struct]) -> str:
    """Return the section of one config class."""
    said = meanings(kind)
    lines = [
        f"\n## {title}\n",
        HEADER,
        "|---|---|---|---|---|",
    ]
    for field in msgspec.structs.fields(kind):
        of = BOUNDED.sub(bounded_text, inspect.formatannotation(field.type))
        of = re.sub(r"Optional\[(.*)\]", r"\1 or None", of.replace("typing.", "").replace("|", "or"))
        of = re.sub(r"kvferry\.[\w.]+", "object", of)
        default = "required" if field.required else f"`{json.dumps(default_of(field))}`"
        example = json.dumps({field.name: EXAMPLES[kind][field.name]})[1:-1]
        meaning = said[field.name].replace("|", "\\|").replace("``", "`")
        meaning = re.sub(r"(?<!`)`([a-z_]+\.[a-z_.]+)`", r"\1", meaning)
        lines.append(f"| `{field.name}` | {of} | {default} | `{example}` | {meaning} |")
    return "\n".join(lines) + "\n"


def default_of(field: msgspec.structs.FieldInfo) -> object:
    """Return the value of a setting that is not given."""
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def page() -> str:
    """Return the page, from the config classes."""
    sections = [
        table("Connector", ConnectorConfig),
        table("An object of `tenants`", TenantConfig),
        table("The object `admin`", AdminConfig),
    ]
    sections += [table(f'Tier with "type": "{kind}"', one) for kind, one in TIERS.items()]
    return HEAD + "".join(sections)


def missing_examples() -> str:
    """Return the lines to paste into `support.setting_examples`, for all settings without an example."""
    return "".join(
        f"    {kind.__name__}: {{{field.name!r}: VALUE, ...}}, with a VALUE that is not the default\n"
        for kind in KINDS
        for field in msgspec.structs.fields(kind)
        if field.name not in EXAMPLES.get(kind, {})
    )


def test_every_setting_has_an_example_and_no_other_key_has_one() -> None:
    assert not missing_examples(), (
        f"add to EXAMPLES in tests/support/setting_examples.py:\n{missing_examples()}"
    )
    fields = {kind: {field.name for field in msgspec.structs.fields(kind)} for kind in KINDS}
    gone = {kind.__name__: given.keys() - fields.get(kind, set()) for kind, given in EXAMPLES.items()}
    assert not any(gone.values()), "remove these from EXAMPLES in tests/support/setting_examples.py"


def test_the_page_says_what_the_config_classes_say() -> None:
    assert not missing_examples(), "the page shows an example of every setting; add the missing ones first"
    assert PAGE.read_text() == page(), (
        "run PYTHONPATH=src:tests .venv/bin/python tests/unit/test_settings_page.py to write docs/settings.md"
    )


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, given in EXAMPLES.items() for key in given], ids=str
)
def test_an_engine_accepts_the_example_of_a_setting_and_it_is_not_the_default(
    kind: type[msgspec.Struct], key: str
) -> None:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    example = EXAMPLES[kind][key]
    others = {name: EXAMPLES[kind][name] for name, field in fields.items() if field.required}
    parse_config(settings_with(kind, {**others, key: example}))
    assert fields[key].required or example != default_of(fields[key])


def test_each_row_of_the_page_is_a_card_of_labelled_lines_on_a_phone() -> None:
    """The style sheet finds the page by its title, and labels cells by the number of their column."""
    assert "extra_css:\n  - narrow.css\n" in (ROOT / "mkdocs.yml").read_text()
    style = (ROOT / "website" / "narrow.css").read_text()
    (phone,) = re.findall(r"@media \(max-width: (\d+)px\) {\n(.*?)^}", style, re.MULTILINE | re.DOTALL)
    assert int(phone[0]) >= PHONE_WIDTH
    title = HEAD.splitlines()[0].removeprefix("# ").lower()
    rules = re.findall(r"([^{}]+){([^{}]*)}", phone[1])
    assert all(one.strip().startswith(f"#{title} ~ ") for found, _ in rules for one in found.split(",\n"))
    stacked = next(body for selectors, body in rules if ":is(tbody, tr, td) " in selectors)
    assert "display: block" in stacked
    assert "overflow-wrap: anywhere" in stacked
    columns = [name.strip() for name in HEADER.strip("|").split("|")]
    labels = re.findall(r'td:nth-child\((\d)\)::before { content: "([a-z]+): "; }', phone[1])
    # The key and the meaning, first and last, are known by their looks.
    assert labels == [(str(at), name) for at, name in enumerate(columns, 1)][1:-1]


def settings_with(kind: type[msgspec.Struct], given: dict[str, Any]) -> dict[str, Any]:
    """Return settings of the connector that contain the given settings of a config class."""
    if kind is ConnectorConfig:
        return given
    if kind is TenantConfig:
        return {"tenants": {"acme": given}}
    if kind is AdminConfig:
        return {"admin": given}
    return {"tiers": [{"type": next(name for name, one in TIERS.items() if one is kind), **given}]}


if __name__ == "__main__":
    PAGE.write_text(page())
