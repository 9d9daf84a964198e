"""Settings of a `FerryMultiConnector`: the list of connectors, and the choice between them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvferry.common.errors import ConfigError
from kvferry.common.parse import parse_settings
from kvferry.connector.choosing import PolicyName
from kvferry.connector.config import check_weight
from kvferry.engines.vllm.config import check_transfer_keys

INHERITED = ("engine_id", "kv_role", "kv_buffer_device", "kv_load_failure_policy")
"""Keys that a child inherits: by default, they have the value that the `FerryMultiConnector` itself has."""

HAND_OVER = {
    "MoRIIOConnector",
    "MooncakeConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
}
"""Class names of vLLM's own connectors that hand a request's KV to another engine."""

OWN_KEYS = ("name", "load_weight")
"""Keys of an entry of ``connectors`` that kvferry adds to those of vLLM's ``KVTransferConfig``."""


class ChildSettings(msgspec.Struct, frozen=True):
    """Settings of one child: an entry of the list ``connectors`` in the user's configuration.

    Attributes:
        name: unique name in errors and metric labels. The default is the name of the child's class, with a
            number from 2 on if that is taken.
    """

    name: str
    load_weight: float  # factor for the tokens that the child offers, for the policy ``weight`` alone
    transfer: dict[str, Any]  # settings of vLLM's ``KVTransferConfig``, by name


class _SourceChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the choice between children.

    Attributes:
        patience_seconds: maximum time that a request waits for a child that is still looking for KV.
        attempts: maximum number of loads for one request, which is then computed.
        load_timeout_seconds: time after which a request goes on without the load of a child that is not
            kvferry's. kvferry's children have this setting of their own.
    """

    source_policy: PolicyName = "weight"
    patience_seconds: float = 10.0
    attempts: int = 2
    load_timeout_seconds: float = 30.0


class MultiSettings(_SourceChoice, frozen=True, kw_only=True):
    """Settings of a `FerryMultiConnector`, which are in ``kv_connector_extra_config``."""

    # If two offers are equally good, the child that is listed first loads.
    children: tuple[ChildSettings, ...]


def parse_multi(extra: Mapping[str, Any]) -> MultiSettings:
    """Parse the ``kv_connector_extra_config`` of a `FerryMultiConnector`, or raise a ConfigError."""
    plain = parse_settings("kv_connector_extra_config", extra, _SourceChoice, beside=("connectors",))
    given = extra.get("connectors")
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ConfigError(
            f"connectors is {given!r}; it must be a list of objects as vLLM's MultiConnector takes them, "
            'each with "kv_connector"'
        )
    for name in ("patience_seconds", "load_timeout_seconds"):
        if not 0 < (seconds := getattr(plain, name)) < 86_400:
            raise ConfigError(f"{name} is {seconds}, it must be above 0 and below a day")
    if not 1 <= plain.attempts <= 16:
        raise ConfigError(f"attempts is {plain.attempts}, it must be 1 to 16")
    children = _named([_entry(number, one) for number, one in enumerate(given)])
    return MultiSettings(children=children, **msgspec.structs.asdict(plain))


def check_hand_over(names: Sequence[str]) -> None:
    """Raise a ConfigError if several children, by name, hand KV to other engines."""
    if len(names) > 1:
        raise ConfigError(
            f"{' and '.join(names)} would both hand KV over to other engines, and a request carries one "
            "offer; leave all but one out of connectors, or set transfer to false where it is a "
            "KVFerryConnector with tiers"
        )


def _entry(number: int, given: Any) -> dict[str, Any]:
    where = f"connectors[{number}]"
    if not isinstance(given, Mapping) or not isinstance(given.get("kv_connector"), str):
        raise ConfigError(f'{where} is {given!r}; it must be an object whose "kv_connector" names a class')
    where += f" ({given['kv_connector']})"
    check_transfer_keys(where, given, OWN_KEYS)
    weight, name = given.get("load_weight", 1.0), given.get("name")
    # A bool is an int in Python.
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"{where}: load_weight is {weight!r}, it must be a number")
    check_weight(f"{where}: load_weight", weight)
    if name is not None and not (isinstance(name, str) and name):
        raise ConfigError(f"{where}: name is {name!r}, it must be a text")
    return dict(given)


def _named(entries: Sequence[dict[str, Any]]) -> tuple[ChildSettings, ...]:
    taken = Counter(entry["name"] for entry in entries if entry.get("name"))
    if taken and (most := taken.most_common(1)[0])[1] > 1:
        raise ConfigError(f"connectors: {most[0]!r} is the name of {most[1]}; give each a name of its own")
    children = []
    for entry in entries:
        name = entry.get("name")
        if not name:
            name = kind = entry["kv_connector"]
            numbers = itertools.count(2)
            while name in taken:
                name = f"{kind}-{next(numbers)}"
            taken[name] = 1
        transfer = {key: value for key, value in entry.items() if key not in OWN_KEYS}
        children.append(ChildSettings(name, float(entry.get("load_weight", 1.0)), transfer))
    return tuple(children)
