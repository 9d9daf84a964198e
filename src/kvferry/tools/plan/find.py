"""Lookup of a model's ``config.json`` by a path, a name in the built-in table or a Hugging Face hub name."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError
from kvferry.tools.plan.hub import CONFIG_FILE, PARAMS_FILE, QUANTIZATION_FILE, hub_config
from kvferry.tools.plan.mistral import from_params
from kvferry.user_cache import expanded


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model of the built-in table.

    Attributes:
        source: origin of the configuration, as a text for users.
        also: names of other models with the same KV cache geometry.
        config: keys and values of the model's ``config.json`` that affect the KV cache.
    """

    name: str
    source: str
    also: tuple[str, ...]
    config: Mapping[str, Any]


@cache
def entries() -> tuple[ModelEntry, ...]:
    """Return all models of the built-in table."""
    raw = tomllib.loads((files("kvferry.tools.plan") / "models.toml").read_text())
    return tuple(
        ModelEntry(
            name,
            fields["source"],
            tuple(fields.get("also", ())),
            {**fields["config"], **dict.fromkeys(fields.get("null", ()))},
        )
        for name, fields in raw.items()
    )


def lookup(name: str) -> ModelEntry | None:
    """Return the model of the built-in table that has the given name; None if there is no such model."""
    wanted = _plain(name)
    return next((entry for entry in entries() if wanted in map(_plain, (entry.name, *entry.also))), None)


def nearest(name: str) -> list[str]:
    """Return up to two model names of the built-in table that are similar to `name`, most similar first."""
    known = {_plain(each): each for entry in entries() for each in (entry.name, *entry.also)}
    # The first words must be similar too: models of different families often have the same size.
    family = [each for each in known if SequenceMatcher(None, _family(name), _family(each)).ratio() >= 0.6]
    return [known[each] for each in get_close_matches(_plain(name), family, 2, 0.5)]


def _family(name: str) -> str:
    """Return the letters at the start of a model's name: ``llama`` of ``meta-llama/Llama-3.1-8B``."""
    return "".join(takewhile(str.isalpha, _plain(name)))


def _plain(name: str) -> str:
    # A leading organisation (``meta-llama/``) is ignored.
    return name.rpartition("/")[2].lower()


# A path to weights must not fill the memory.
_MAX_BYTES = 16 << 20
_MISTRAL_WEIGHTS = "consolidated*.safetensors"


def find_config(model: str) -> tuple[str, Mapping[str, Any]]:
    """Find a model, and return its display name and the content of its ``config.json``.

    Args:
        model: path of a ``config.json``, a ``params.json`` or their folder, name in the built-in table, or
            name on the hub. An existing path is taken first, then the table.

    Raises:
        ConfigError: the model is unknown, or its ``config.json`` cannot be read.
    """
    path = expanded(model)
    if os.path.exists(path) or _looks_like_a_path(model):  # noqa: PTH110 - Path.exists raises where it may not look
        found = _in_folder(path) if os.path.isdir(path) else path  # noqa: PTH112 - so does Path.is_dir
        named_by_folder = found.name in (CONFIG_FILE, PARAMS_FILE)
        return (found.parent.name if named_by_folder else found.stem) or model, _content(found)
    if (entry := lookup(model)) is not None:
        return entry.name, entry.config
    if model.count("/") == 1:
        try:
            return model, _content(hub_config(model))
        except ConfigError as error:
            raise ConfigError(
                f"{model!r} is not in the built-in table{_hint(model)}, and {error}; give the path of its "
                "config.json"
            ) from error
    raise ConfigError(
        f"no model is called {model!r}{_hint(model)}; run `kvferry plan --list` for all names, or give a path"
    )


def _looks_like_a_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.endswith(".json") or model.count("/") > 1


def _hint(model: str) -> str:
    close = nearest(model)
    return f"; did you mean {' or '.join(close)}" if close else ""


def _in_folder(folder: Path) -> Path:
    """Return the path of the file that vLLM takes in a folder: in Mistral's format if the weights are."""
    own, params = folder / CONFIG_FILE, folder / PARAMS_FILE
    is_mistral = params.exists() and (not own.exists() or any(folder.glob(_MISTRAL_WEIGHTS)))
    return params if is_mistral else own


def _content(path: Path) -> Mapping[str, Any]:
    """Return the content of a model's file, in the keys of a ``config.json``, with what stands beside it."""
    if path.name == PARAMS_FILE:
        beside = path.with_name(CONFIG_FILE)
        return from_params(_load(path), _load(beside) if beside.exists() else {})
    config, beside = _load(path), path.with_name(QUANTIZATION_FILE)
    if path.name == CONFIG_FILE and config.get("quantization_config") is None and beside.is_file():
        return {**config, "quantization_config": _load(beside)}
    return config


def _load(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_BYTES >> 20} MiB, which no config.json is")
        read = json.loads(path.read_bytes())
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"cannot read {path}: {reason}; give a config.json or the folder it is in"
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}; give a model's config.json") from error
    if not isinstance(read, dict):
        raise ConfigError(
            f"{path} holds a {type(read).__name__}, an object with a model's settings is expected"
        )
    return read
