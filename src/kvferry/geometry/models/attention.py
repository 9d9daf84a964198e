"""What an attention layer keeps: K and V per head, or one latent for all heads."""

from __future__ import annotations

from kvferry.errors import ConfigError
from kvferry.geometry.models.config import Config, whole
from kvferry.geometry.models.dtypes import PACKED_LATENT, SCALED, element_bytes
from kvferry.geometry.models.families import Family, Mixer
from kvferry.geometry.rank import GroupKind
from kvferry.geometry.store import LayerStore, Stored

_PACKED_LATENT_BYTES = 656
_INDEX_SCALE_TOKENS = 128
_KINDS = {
    Mixer.FULL: GroupKind.FULL,
    Mixer.SLIDING: GroupKind.SLIDING,
    Mixer.CHUNKED: GroupKind.CHUNKED,
}


def has_latent(config: Config) -> bool:
    """Whether attention layers keep a latent (MLA) in place of K and V."""
    return config.maybe("kv_lora_rank") is not None


def attention_stores(
    config: Config, family: Family, mixer: Mixer, cache_dtype: str, model_dtype: str
) -> tuple[LayerStore, ...]:
    """What one attention layer keeps; more than one where it has a second cache.

    Args:
        config, family: the model's.
        mixer: FULL, SLIDING or CHUNKED.
        cache_dtype, model_dtype: as in `dtypes`.

    Raises:
        ConfigError: a size is missing or makes no sense, or the element type is not for this attention.
    """
    if has_latent(config):
        return _latents(config, cache_dtype, model_dtype)
    if cache_dtype == PACKED_LATENT:
        raise ConfigError(f"{PACKED_LATENT} is for latents (MLA); this model keeps K and V, choose fp8")
    item = element_bytes(cache_dtype, model_dtype)
    heads, k_width, v_width = _heads(config, windowed=mixer is Mixer.SLIDING)
    fields = []
    for name, width in (("k", k_width), ("v", v_width)):
        fields.append(Stored(name, item, heads, (("content", width),)))
        if cache_dtype in SCALED:
            fields.append(Stored(f"{name}.scale", 4, heads))
    return (LayerStore(_KINDS[mixer], _reach(config, family, mixer), tuple(fields)),)


def _reach(config: Config, family: Family, mixer: Mixer) -> int:
    if mixer is Mixer.SLIDING:
        return config.number("sliding_window") + family.window_offset
    return config.number("attention_chunk_size") if mixer is Mixer.CHUNKED else 0


def _heads(config: Config, *, windowed: bool) -> tuple[int, int, int]:
    """KV heads, and elements of K and of V per head. Some families say them twice, by kind of layer."""
    heads = _kv_heads(config)
    k_width = _head_width(config)
    v_width = config.maybe("v_head_dim") or k_width
    if windowed:
        heads = config.maybe("swa_num_key_value_heads") or heads
        k_width = config.maybe("swa_head_dim") or k_width
        v_width = config.maybe("swa_v_head_dim", "swa_head_dim") or v_width
    elif wide := config.maybe("global_head_dim"):
        # Gemma 4: heads of layers without a window are wider, and fewer.
        heads = config.maybe("num_global_key_value_heads") or heads
        k_width = v_width = wide
    return heads, k_width, v_width


def _kv_heads(config: Config) -> int:
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    named = config.maybe("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    return named or config.number("num_attention_heads", "n_head", "n_heads")


def _head_width(config: Config) -> int:
    if said := config.maybe("head_dim", "attention_head_dim", "kv_channels"):
        return said
    hidden, heads = (
        config.number("hidden_size", "n_embd", "d_model"),
        config.number("num_attention_heads", "n_head", "n_heads"),
    )
    if hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}; add head_dim"
        )
    return hidden // heads


def _latents(config: Config, cache_dtype: str, model_dtype: str) -> tuple[LayerStore, ...]:
    """One latent for all heads, which every rank keeps whole; an indexer beside it in sparse attention."""
    if cache_dtype in SCALED:
        raise ConfigError(f"{cache_dtype} is for K and V; this model keeps latents (MLA), choose fp8")
    width = config.number("kv_lora_rank") + config.number("qk_rope_head_dim")
    latent = Stored("latent", element_bytes(cache_dtype, model_dtype), 0, (("content", width),))
    if cache_dtype == PACKED_LATENT:
        latent = Stored("latent", 1, 0, (("content", _PACKED_LATENT_BYTES),))
    stores = [LayerStore(GroupKind.MLA, 0, (latent,))]
    if (index := config.maybe("index_head_dim")) is not None:
        # DeepSeek V3.2: fp8 keys with a float32 scale per 128 elements, a cache layer of its own.
        scaled = index + whole("index_head_dim", index, _INDEX_SCALE_TOKENS) // _INDEX_SCALE_TOKENS * 4
        stores.append(LayerStore(GroupKind.MLA, 0, (Stored("indexer", 1, 0, (("content", scaled),)),)))
    return tuple(stores)
