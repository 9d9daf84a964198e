"""The built-in table of well-known models."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of the table.

    Attributes:
        name: name of the model.
        source: origin of its configuration.
        also: names of other models with the same geometry.
        config: the keys of its ``config.json`` that decide the KV cache.
    """

    name: str
    source: str
    also: tuple[str, ...]
    config: Mapping[str, Any]


@cache
def entries() -> tuple[ModelEntry, ...]:
    """Return the models of the table."""
    raw = tomllib.loads((files("kvferry.plan") / "models.toml").read_text())
    return tuple(
        ModelEntry(name, said["source"], tuple(said.get("also", ())), said["config"])
        for name, said in raw.items()
    )


def lookup(name: str) -> ModelEntry | None:
    """Return the model of that name, or None. Case and a leading organisation do not matter."""
    wanted = _plain(name)
    return next((entry for entry in entries() if wanted in map(_plain, (entry.name, *entry.also))), None)


def nearest(name: str) -> list[str]:
    """Return up to two names in the table that look like `name`, the likeliest first."""
    known = {_plain(each): each for entry in entries() for each in (entry.name, *entry.also)}
    return [known[each] for each in get_close_matches(_plain(name), known, 2, 0.5)]


def _plain(name: str) -> str:
    return name.rpartition("/")[2].lower()
