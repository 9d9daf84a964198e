"""The mixers of every layer, read from a ``config.json``.

Model families write the mixers in many forms: a word per layer, a string of letters, a period, a list of
layer numbers. Each form has a rule, and the first rule that finds its key in the file decides.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping
from typing import Any, TypeAlias

from kvferry.common.errors import ConfigError
from kvferry.tools.models.attention import without_attention
from kvferry.tools.models.config import ModelConfig, check_nested, checked_int
from kvferry.tools.models.families import Mixer, ModelFamily

# Mixers of one layer: empty for a layer without a cache, two if attention and recurrence run side by side.
Mixers: TypeAlias = tuple[Mixer, ...]

# Mixers of each entry of a list with one per layer. None stands for the recurrence of the model's family.
_Entries: TypeAlias = Mapping[Any, tuple[Mixer | None, ...]]

# Returns the mixers of every layer; None if the file does not have the rule's key.
Rule: TypeAlias = Callable[[ModelConfig, ModelFamily], list[Mixers] | None]

_FULL: Mixers = (Mixer.FULL,)
_SLIDING: Mixers = (Mixer.SLIDING,)
_WORDS: _Entries = {
    "full_attention": _FULL,
    "attention": _FULL,
    "full": _FULL,
    "sliding_attention": _SLIDING,
    "chunked_attention": (Mixer.CHUNKED,),
    "short_conv": (Mixer.SHORT_CONV,),
    "conv": (Mixer.SHORT_CONV,),
    "deepseek_sparse_attention": _FULL,
    "indexed_attention": _FULL,
    "mlp": (),
    "moe": (),
    "linear_attention": (None,),
    "mamba": (None,),
    "hybrid": (None, Mixer.FULL),
}
_LETTERS: _Entries = {"*": _FULL, "-": (), "E": (), "M": (None,)}
# Keys that name mixers. Once a rule has decided, all of them count as read.
_PATTERN = (
    "layer_types", "layers_block_type", "hybrid_override_pattern", "attn_layer_period", "attn_layer_offset",
    "attn_layer_indices", "full_attention_interval", "layer_group_size", "sliding_window_pattern",
    "_sliding_window_pattern", "use_sliding_window", "max_window_layers", "no_rope_layer_interval",
    "no_rope_layers", "full_attn_idxs", "hybrid_layer_ids", "global_attn_every_n_layers",
    "full_attention_layers", "prefix_dense_sliding_window_pattern", "layer_switch", "no_rope_layers_interval",
    "sliding_window_layers", "attention_pattern", "hybrid_layer_pattern",
)  # fmt: skip
# Keys that describe sliding windows. They are irrelevant if no layer has one.
_WINDOW = (
    "sliding_window", "sliding_window_size", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim",
    "attention_other_setting",
)  # fmt: skip
_RECURRENT_TYPES = (
    "Mamba, Mamba2, gated delta net, Kimi delta attention, lightning attention and short convolution"
)
_KIMI_KEYS = (
    "kda_layers", "full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size", "gate_lower_bound",
    "use_full_rank_gate",
)  # fmt: skip


def mixers(config: ModelConfig, family: ModelFamily) -> list[Mixers]:
    """Return the mixers of every layer, or raise ConfigError if the file names an unknown kind of layer.

    If no rule applies, all layers have sliding windows, if the file has one that is on, or full attention.
    """
    for rule in _RULES:
        if (found := rule(config, family)) is not None:
            config.mark_read(*_PATTERN)
            if not any(Mixer.SLIDING in layer for layer in found):
                config.mark_read(*_WINDOW)
            return [layer * family.attentions for layer in found]
    window = config.optional_int("sliding_window")
    windowed = window is not None and config.get("use_sliding_window") is not False
    if config.get("use_sliding_window") is False:
        config.mark_read(*_WINDOW, "max_window_layers")
    # LongCat has two attention caches per layer.
    return [(_SLIDING if windowed else _FULL) * family.attentions] * config.layers


def _recurrence(config: ModelConfig, family: ModelFamily, key: str) -> Mixer:
    if family.recurrent is None:
        raise ConfigError(
            f"config.json: {key} names recurrent layers, but what they keep is not known for model type "
            f"{config.model_type or 'unknown'}; known are those of {_RECURRENT_TYPES}"
        )
    return family.recurrent


def _compressed(config: ModelConfig, _family: ModelFamily) -> list[Mixers] | None:
    """DeepSeek V4: the caches of a layer follow from its compression ratio, not from its mixer."""
    return None if config.get("compress_ratios") is None else [_FULL] * config.layers


def _blocks(config: ModelConfig, _family: ModelFamily) -> list[Mixers] | None:
    """Nemotron-NAS: a layer that skips attention has no mixers."""
    if config.get("block_configs") is None:
        return None
    skipped = without_attention(config)
    return [() if i in skipped else _FULL for i in range(config.layers)]


def _same_in_all_layers(config: ModelConfig, family: ModelFamily) -> list[Mixers] | None:
    if not family.everywhere or family.recurrent is None:
        return None
    beside = _FULL if family.beside_attention else ()
    return [(family.recurrent, *beside)] * config.layers


def _letters(config: ModelConfig, family: ModelFamily) -> list[Mixers] | None:
    """Nemotron-H: ``M`` is recurrence, ``*`` attention, and ``-`` and ``E`` are feed-forward layers."""
    return _per_layer(config, family, "hybrid_override_pattern", _LETTERS)


def _words(config: ModelConfig, family: ModelFamily) -> list[Mixers] | None:
    """A word per layer. The words, such as ``linear_attention``, do not state the kind of recurrence."""
    name = next((n for n in ("layers_block_type", "layer_types") if config.get(n)), None)
    return None if name is None else _per_layer(config, family, name, _WORDS)


def _per_layer(config: ModelConfig, family: ModelFamily, name: str, known: _Entries) -> list[Mixers] | None:
    """Return the mixers of each layer from the entries of the key `name`; None without this key."""
    entries = config.listed(name, config.layers)
    if entries is None:
        return None
    unknown = [repr(word) for word in entries if not isinstance(word, Hashable) or word not in known]
    if unknown:
        raise ConfigError(
            f"config.json: {name} has {', '.join(dict.fromkeys(unknown))}, which is none of "
            f"{', '.join(map(str, known))}"
        )
    return [tuple(mixer or _recurrence(config, family, name) for mixer in known[word]) for word in entries]


def _attention_period(config: ModelConfig, family: ModelFamily) -> list[Mixers] | None:
    """Jamba: the layer at ``attn_layer_offset`` of each period has attention, all others are recurrent."""
    period = config.optional_int("attn_layer_period")
    if period is None:
        return None
    offset = checked_int("attn_layer_offset", config.get("attn_layer_offset") or 0, 0)
    return _attend_at(config, family, "attn_layer_period", range(offset, config.layers, period))


def _attention_numbers(config: ModelConfig, family: ModelFamily) -> list[Mixers] | None:
    """Bamba: the listed layers have attention, all others are recurrent."""
    numbers = config.get("attn_layer_indices")
    if not isinstance(numbers, list):
        return None
    return _attend_at(config, family, "attn_layer_indices", numbers)


def _attend_at(config: ModelConfig, family: ModelFamily, key: str, numbers: Container[int]) -> list[Mixers]:
    recurrence = (_recurrence(config, family, key),)
    return [_FULL if i in numbers else recurrence for i in range(config.layers)]


def _attention_flags(config: ModelConfig, family: ModelFamily) -> list[Mixers] | None:
    """MiniMax-Text-01: 1 is attention, 0 is recurrence."""
    return _per_layer(config, family, "attn_type_list", {1: _FULL, 0: (None,)})


def _last_of_each(config: ModelConfig, family: ModelFamily) -> list[Mixers] | None:
    """Qwen3-Next and Bailing: the last layer of each period has attention, all others are recurrent."""
    name = next((n for n in ("full_attention_interval", "layer_group_size") if config.optional_int(n)), None)
    if name is None or family.recurrent is None:
        return None
    period = config.number(name)
    return _attend_at(config, family, name, range(period - 1, config.layers, period))


def _kimi(config: ModelConfig, family: ModelFamily) -> list[Mixers] | None:
    """Kimi Linear: the recurrent and the attention layers are listed, counted from one."""
    value = config.get("linear_attn_config")
    if not isinstance(value, Mapping):
        return None
    check_nested(ModelConfig(value, {}), "linear_attn_config", _KIMI_KEYS)
    delta, full = (_layer_numbers(value, name) for name in ("kda_layers", "full_attn_layers"))
    if sorted([*delta, *full]) != list(range(1, config.layers + 1)):
        raise ConfigError(
            f"config.json: kda_layers and full_attn_layers name {len(delta)} and {len(full)} layers, but "
            f"together they must be 1 to {config.layers}, each once"
        )
    return _attend_at(config, family, "linear_attn_config", [number - 1 for number in full])


def _layer_numbers(value: Mapping[str, Any], name: str) -> list[int]:
    found = value.get(name) or []
    if not isinstance(found, list) or not all(type(number) is int for number in found):
        raise ConfigError(
            f"config.json: linear_attn_config.{name} is {found!r}, a list of layer numbers is expected"
        )
    return found


def _window_flags(config: ModelConfig, family: ModelFamily) -> list[Mixers] | None:
    """MiMo-V2: 1 is a sliding window, 0 is full attention."""
    found = _per_layer(config, family, "hybrid_layer_pattern", {1: _SLIDING, 0: _FULL})
    if found is not None:
        config.mark_read("attention_chunk_size")
    return found


def _chunks(config: ModelConfig, _family: ModelFamily) -> list[Mixers] | None:
    """Llama 4: layers with rotary position embeddings have chunked attention, the others full attention."""
    if config.optional_int("attention_chunk_size") is None:
        return None
    if (period := config.optional_int("no_rope_layer_interval")) is None:
        return None
    rotary = config.listed("no_rope_layers", config.layers) if config.get("no_rope_layers") else None
    rotary = rotary or [(i + 1) % period != 0 for i in range(config.layers)]
    return [(Mixer.CHUNKED,) if each else _FULL for each in rotary]


def _window_pattern(config: ModelConfig, _family: ModelFamily) -> list[Mixers] | None:
    """Sliding windows by a pattern, if the file gives a window size.

    In Gemma 3 and Cohere 2, the last layer of each period has full attention. In EXAONE 4, a string is
    repeated over the model: ``L`` is a sliding window, and any other letter is full attention.
    """
    pattern = config.get("sliding_window_pattern", "_sliding_window_pattern")
    if not pattern or config.optional_int("sliding_window", "sliding_window_size") is None:
        return None
    if isinstance(pattern, str):
        windowed = [pattern[i % len(pattern)] == "L" for i in range(config.layers)]
    else:
        period = checked_int("sliding_window_pattern", pattern, 1)
        windowed = [(i + 1) % period != 0 for i in range(config.layers)]
    return [_SLIDING if each else _FULL for each in windowed]


def _window_from(config: ModelConfig, _family: ModelFamily) -> list[Mixers] | None:
    """Qwen2 and Qwen3: layers from ``max_window_layers`` on have a sliding window."""
    if config.get("use_sliding_window") is not True or config.optional_int("sliding_window") is None:
        return None
    first = checked_int("max_window_layers", config.get("max_window_layers") or 0, 0)
    return [_SLIDING if i >= first else _FULL for i in range(config.layers)]


_RULES: tuple[Rule, ...] = (
    _compressed,
    _blocks,
    _same_in_all_layers,
    _letters,
    _words,
    _attention_period,
    _attention_numbers,
    _attention_flags,
    _last_of_each,
    _kimi,
    _window_flags,
    _chunks,
    _window_pattern,
    _window_from,
)
