"""Lookup of a model's ``config.json`` by a path, a name in the built-in table or a Hugging Face hub name."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import Any

from kvferry.common.errors import ConfigError
from kvferry.common.files import expanded

CONFIG_FILE = "config.json"
# A model in Mistral's format has this file. Beside weights in this format, vLLM takes it for ``config.json``.
PARAMS_FILE = "params.json"
# Older releases of ModelOpt keep here what vLLM takes for the ``quantization_config`` of a ``config.json``
# without one.
_QUANTIZATION_FILE = "hf_quant_config.json"
# A path to weights must not fill the memory.
_MAX_BYTES = 16 << 20
_MISTRAL_WEIGHTS = "consolidated*.safetensors"

_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
}
# Keys that do not affect the KV cache, or that are converted one by one.
_OTHERS = (
    "hidden_dim", "norm_eps", "activation", "tied_embeddings", "max_seq_len", "yarn", "llama_4_scaling",
    "moe", "quantization", "multimodal", "vision_encoder", "use_biases", "causal", "ragged_attention",
    "q_lora_rank",
)  # fmt: skip


class NotOnHub(ConfigError):
    """Raised if the hub does not know or give a model, or cannot be reached. The message is a clause."""


def hub_config(model: str) -> Path:
    """Return the path of a model's ``config.json`` in the local Hugging Face cache. Download it if needed.

    Also download the file with the quantization config, if the model has one.

    Raises:
        NotOnHub: the model is not in the cache, and the hub does not know it or cannot be reached.
        ConfigError: the model has no ``config.json``. The message is a clause.
    """
    import huggingface_hub as hub  # noqa: PLC0415 - slow to import
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError  # noqa: PLC0415 - the same

    try:
        # Without a network this fails at once. The download alone would repeat its request for half a minute.
        hub.get_hf_file_metadata(hub.hf_hub_url(model, CONFIG_FILE))
        found = Path(hub.hf_hub_download(model, CONFIG_FILE))
        with suppress(EntryNotFoundError):
            hub.hf_hub_download(model, _QUANTIZATION_FILE)
    except Exception as error:  # for every failure of network or hub, the remedy is the same
        with suppress(ValueError):  # not the name of a model
            if isinstance(cached := hub.try_to_load_from_cache(model, CONFIG_FILE), str):
                return Path(cached)
        if isinstance(error, EntryNotFoundError):
            raise ConfigError(f"the Hugging Face hub has no {CONFIG_FILE} of it") from error
        if isinstance(error, HfHubHTTPError):
            why = "does not give it (is the name right, does it need HF_TOKEN?)"
        elif isinstance(error, ValueError):
            why = "has no such names"
        else:
            why = "cannot be reached"
        raise NotOnHub(f"the Hugging Face hub {why} ({type(error).__name__})") from error
    return found


def _from_params(params: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values that a ``config.json`` of a model has, from its ``params.json``.

    >>> _from_params({"n_layers": 2, "n_heads": 4, "sliding_window": [8, None]}, {})["layer_types"]
    ['sliding_attention', 'full_attention']

    Args:
        defaults: content of the ``config.json`` beside it, for keys that follow from nothing in ``params``.
    """
    config = {_NAMES.get(key, key): value for key, value in params.items() if key not in _OTHERS}
    moe, media = params.get("moe"), params.get("multimodal") or {}
    if (media.get("whisper_model_args") or {}).get("encoder_args", {}).get("causal"):
        raise ConfigError("params.json: its causal audio encoder keeps KV that kvferry does not know")
    latent = bool(params.get("qk_nope_head_dim")) and not moe
    if params.get("model_type") == "mamba":
        config["model_type"] = "mamba2"
    elif latent or (moe or {}).get("num_shared_experts"):
        config["model_type"] = "deepseek_v3"
    else:
        config["model_type"] = "transformer"
    config |= _windows(params) | _quantization(params)
    if media or params.get("vision_encoder"):
        top = {key: config.pop(key) for key in ("quantization_config",) if key in config}
        config = {"model_type": "pixtral", "text_config": config, **top}
    return {**defaults, **config}


def _windows(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window and the type of every layer. Mistral gives one window, or a pattern that repeats."""
    window, layers = params.get("sliding_window"), params.get("n_layers")
    if not window or not isinstance(layers, int):
        return {}
    pattern = window if isinstance(window, list) else [window]
    types = ["full_attention" if each is None else "sliding_attention" for each in pattern]
    sizes = {each for each in pattern if each is not None}
    if len(sizes) > 1:
        raise ConfigError(f"params.json: sliding_window has {len(sizes)} sizes, one is expected")
    return {
        "sliding_window": next(iter(sizes), None),
        "layer_types": params.get("layer_types") or types * (layers // len(pattern)),
    }


def _quantization(params: Mapping[str, Any]) -> dict[str, Any]:
    found = params.get("quantization") or {}
    method = str(found.get("quant_method", "")).lower().replace("_", "-")
    # Only llm-compressor's checkpoints can quantise the KV cache. Other kinds concern weights.
    if method != "compressed-tensors":
        return {}
    return {"quantization_config": {**found, "quant_method": method}}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model of the built-in table. `also` names others with the same KV cache geometry."""

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


def find_config(model: str) -> tuple[str, Mapping[str, Any]]:
    """Find a model, and return its display name and the content of its ``config.json``.

    `model` is a path of a ``config.json``, a ``params.json`` or their folder, a name in the built-in table,
    or a name on the hub. An existing path is taken first, then the table.
    """
    path = expanded(model)
    is_path = model.startswith((".", "/", "~")) or model.endswith(".json") or model.count("/") > 1
    if is_path or os.path.exists(path):  # noqa: PTH110 - Path.exists raises where it may not look
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


def _hint(model: str) -> str:
    close = nearest(model)
    return f"; did you mean {' or '.join(close)}" if close else ""


def _in_folder(folder: Path) -> Path:
    """Return the path of the file that vLLM takes in a folder: in Mistral's format if the weights are."""
    own, params = folder / CONFIG_FILE, folder / PARAMS_FILE
    is_mistral = params.exists() and (not own.exists() or any(folder.glob(_MISTRAL_WEIGHTS)))
    return params if is_mistral else own


def _content(path: Path) -> Mapping[str, Any]:
    """Return a model's file, in the keys of a ``config.json``, with what stands beside it."""
    if path.name == PARAMS_FILE:
        beside = path.with_name(CONFIG_FILE)
        return _from_params(_load(path), _load(beside) if beside.exists() else {})
    config, beside = _load(path), path.with_name(_QUANTIZATION_FILE)
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
