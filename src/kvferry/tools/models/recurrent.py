"""The cache of a recurrent layer: one state of fixed size for a sequence of any length.

Shapes and element types are those of vLLM's ``mamba_utils``: first the last inputs of the convolution, then
the recurrent state. The convolution has one field for each part that tensor parallelism shards separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kvferry.common.errors import ConfigError
from kvferry.geometry import GroupKind
from kvferry.tools.models.config import FLOATS, ModelConfig, checked_int
from kvferry.tools.models.families import Mixer
from kvferry.tools.models.store import LayerCache, StoredField

Builder: TypeAlias = Callable[[ModelConfig, int, int], tuple[StoredField, ...]]


def recurrent_store(config: ModelConfig, mixer: Mixer, model_dtype: str, ssm_dtype: str) -> LayerCache:
    """Return the cache of one recurrent layer, or raise a ConfigError if a size is missing or invalid.

    The element types of the convolution's inputs and of the recurrent state are keys of `FLOATS`.
    """
    return LayerCache(GroupKind.STATE, 0, _BUILDERS[mixer](config, FLOATS[model_dtype], FLOATS[ssm_dtype]))


def _past_inputs_axis(kernel: int) -> tuple[str, int]:
    if kernel < 2:
        raise ConfigError(
            f"config.json: a convolution over {kernel} tokens keeps nothing; at least 2 are expected"
        )
    return ("tap", kernel - 1)


def _mamba1(config: ModelConfig, item: int, ssm_item: int) -> tuple[StoredField, ...]:
    hidden = config.number("hidden_size")
    expand = config.optional_int("mamba_expand")
    channels = expand * hidden if expand else config.number("intermediate_size")
    past_inputs = _past_inputs_axis(config.number("mamba_d_conv", "conv_kernel"))
    state = config.number("mamba_d_state", "state_size")
    return (
        StoredField("conv.x", item, channels, (past_inputs,)),
        StoredField("ssm", ssm_item, channels, (("state", state),)),
    )


def _mamba2(config: ModelConfig, item: int, ssm_item: int) -> tuple[StoredField, ...]:
    heads = config.number("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    channels = _mamba2_channels(config)
    width = config.get("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")
    if width in (None, "auto") and channels is not None:
        width = channels // heads
    width = checked_int("mamba_head_dim", width, 1)
    if channels is not None and channels != heads * width:
        raise ConfigError(
            f"config.json: {heads} state heads of {width} are not the {channels} channels of the convolution"
        )
    groups = config.number("mamba_n_groups", "mamba_ngroups", "n_groups")
    state = config.number("ssm_state_size", "mamba_d_state", "state_size")
    past_inputs = _past_inputs_axis(config.number("mamba_d_conv", "conv_kernel"))
    return (
        StoredField("conv.x", item, heads, (("channel", width), past_inputs)),
        StoredField("conv.b", item, groups, (("channel", state), past_inputs)),
        StoredField("conv.c", item, groups, (("channel", state), past_inputs)),
        StoredField("ssm", ssm_item, heads, (("row", width), ("state", state))),
    )


def _mamba2_channels(config: ModelConfig) -> int | None:
    """Return the number of channels of the convolution's input ``x``; None if the file does not give it."""
    if config.model_type == "nemotron_h":
        # Its channels are those of the heads, whatever this key is.
        config.mark_read("expand")
        return None
    if value := config.optional_int("mamba_d_ssm"):
        config.mark_read("mamba_expand", "expand")
        return value
    expand = config.optional_int("mamba_expand", "expand")
    return expand * config.number("hidden_size") if expand else None


def _gated_delta(config: ModelConfig, item: int, ssm_item: int) -> tuple[StoredField, ...]:
    k_heads, v_heads = config.number("linear_num_key_heads"), config.number("linear_num_value_heads")
    k_width, v_width = config.number("linear_key_head_dim"), config.number("linear_value_head_dim")
    past_inputs = _past_inputs_axis(config.number("linear_conv_kernel_dim"))
    return _delta((k_heads, k_width), (v_heads, v_width), past_inputs, item, ssm_item)


def _kimi_delta(config: ModelConfig, item: int, ssm_item: int) -> tuple[StoredField, ...]:
    value: Mapping[str, Any] = config.get("linear_attn_config") or {}
    inner = ModelConfig(value, {})
    of = (inner.number("num_heads"), inner.number("head_dim"))
    return _delta(of, of, _past_inputs_axis(inner.number("short_conv_kernel_size")), item, ssm_item)


def _delta(
    keys: tuple[int, int], values: tuple[int, int], past_inputs: tuple[str, int], item: int, ssm_item: int
) -> tuple[StoredField, ...]:
    """Return the fields of a delta rule: past inputs of q, k and v, and one state matrix per head.

    Args:
        keys, values: (number of heads, elements per head) of k and of v.
    """
    (k_heads, k_width), (v_heads, v_width) = keys, values
    return (
        StoredField("conv.q", item, k_heads, (("channel", k_width), past_inputs)),
        StoredField("conv.k", item, k_heads, (("channel", k_width), past_inputs)),
        StoredField("conv.v", item, v_heads, (("channel", v_width), past_inputs)),
        StoredField("ssm", ssm_item, v_heads, (("row", v_width), ("state", k_width))),
    )


def _lightning(config: ModelConfig, _item: int, ssm_item: int) -> tuple[StoredField, ...]:
    heads = config.number("num_attention_heads")
    width = config.optional_int("head_dim") or config.number("hidden_size") // heads
    return (StoredField("ssm", ssm_item, heads, (("row", width), ("state", width))),)


def _short_conv(config: ModelConfig, item: int, _ssm_item: int) -> tuple[StoredField, ...]:
    channels = config.number("conv_dim", "hidden_size")
    config.mark_read("block_dim")  # it has the same width and does not affect the cache
    return (StoredField("conv", item, channels, (_past_inputs_axis(config.number("conv_L_cache")),)),)


_BUILDERS: Mapping[Mixer, Builder] = {
    Mixer.MAMBA1: _mamba1,
    Mixer.MAMBA2: _mamba2,
    Mixer.GATED_DELTA: _gated_delta,
    Mixer.KIMI_DELTA: _kimi_delta,
    Mixer.LIGHTNING: _lightning,
    Mixer.SHORT_CONV: _short_conv,
}
