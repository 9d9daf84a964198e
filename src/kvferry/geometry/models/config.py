"""Lookup of the keys of a ``config.json``, which have different names in different model families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import ConfigError

_INNER = ("thinker_config", "text_config", "llm_config", "language_config")
DTYPES = ("dtype", "torch_dtype")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Keys whose value has one entry per layer: a list of words or a string of letters.
PER_LAYER = ("layers_block_type", "layer_types", "hybrid_override_pattern")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The part of a ``config.json`` that describes the language model.

    Attributes:
        defaults: default values of the model family, by key.
        read_keys: names of the keys that were read so far. Every lookup adds names to this set.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    # A key that nothing has read might affect the KV cache (`strict`).
    read_keys: set[str] = field(default_factory=set, compare=False)

    @property
    def model_type(self) -> str:
        """Name of the model family; empty if the file has none."""
        return str(self.get("model_type") or "")

    @property
    def _of_type(self) -> str:
        return f" of model type {self.model_type}" if self.model_type else ""

    @property
    def layers(self) -> int:
        """Number of decoder layers, or of entries in a list with one per layer if no key gives it."""
        if self.get(*_LAYER_COUNTS) is None:
            lists = (self.get(name) for name in PER_LAYER)
            if (
                entries := next((value for value in lists if isinstance(value, list | str)), None)
            ) is not None:
                return len(entries)
        return self.number(*_LAYER_COUNTS)

    def get(self, *names: str) -> Any:
        """Return the value of the first key in `names` that has a value; None if none of them has one.

        The names are alternative keys for the same setting. The key that was found is recorded as read, and
        so are the other keys in `names` to which the file gives the same value.
        """
        for known in (self.values, self.defaults):
            value = next((known[name] for name in names if known.get(name) is not None), None)
            if value is not None:
                self.read_keys.update(name for name in names if self.values.get(name) == value)
                return value
            # A null in the file turns the setting off, so the family's default does not apply.
            if any(name in self.values for name in names):
                return None
        return None

    def mark_read(self, *names: str) -> None:
        """Record keys that do not matter for this model as read, so that they are not reported."""
        self.read_keys.update(names)

    def nested(self, name: str) -> ModelConfig:
        """Return the object under a key as a configuration; it is empty if the key is absent.

        Raises:
            ConfigError: the value is not a JSON object.
        """
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.json: {name} is {value!r}, an object is expected")
        return ModelConfig(value, {})

    def number(self, *names: str) -> int:
        """Return the value of the first key in `names` that is present, as an integer of at least 1.

        Raises:
            ConfigError: no key is present, or the value is not such an integer.
        """
        value = self.get(*names)
        if value is None:
            raise ConfigError(
                f"config.json{self._of_type} has no {_either(names)}, which decides the size of its KV "
                "cache; add it to the file"
            )
        return checked_int(names[0], value, 1)

    def optional_int(self, *names: str) -> int | None:
        """Return what `number` returns; None if no key is present, or the value is 0 or false."""
        value = self.get(*names)
        return checked_int(names[0], value, 1) if value else None

    def listed(self, name: str, count: int) -> Sequence[Any] | None:
        """Return the value of a key with one entry per layer; None if the key is absent.

        Raises:
            ConfigError: the value is not a list or string of `count` entries.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple | str) or len(value) != count:
            found = f"{len(value)} entries" if isinstance(value, list | tuple | str) else repr(value)
            raise ConfigError(
                f"config.json: {name} has {found} for {count} layers; one per layer is expected"
            )
        return value


def checked_int(name: str, value: Any, least: int) -> int:
    """Return `value` unchanged if it is an integer of at least `least`.

    Raises:
        ConfigError: it is not. The message names the key `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"config.json: {name} is {value!r}, a whole number of at least {least} is expected")
    return value


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model inside a multimodal model's configuration.

    If the inner configuration has no model type, element type or quantization, the value of the outer one is
    added.
    """
    outer = config
    known = ("model_type", *DTYPES, "quantization_config")
    while inner := next((outer[name] for name in _INNER if isinstance(outer.get(name), Mapping)), None):
        kept = {name: outer[name] for name in known if outer.get(name) is not None}
        outer = {**inner, **{name: value for name, value in kept.items() if inner.get(name) is None}}
    return outer


def _either(names: Sequence[str]) -> str:
    return " or ".join(names)
