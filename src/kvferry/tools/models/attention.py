"""The cache of an attention layer: K and V per head, or latents (MLA), and the keys of an indexer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.common.errors import ConfigError
from kvferry.geometry import GroupKind
from kvferry.tools.models.config import FLOATS, PACKED_LATENT, SCALED, ModelConfig, checked_int, element_bytes
from kvferry.tools.models.families import Mixer, ModelFamily, layer_overrides
from kvferry.tools.models.store import LayerCache, StoredField

_KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups",
)  # fmt: skip
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KINDS = {Mixer.FULL: GroupKind.FULL, Mixer.SLIDING: GroupKind.SLIDING, Mixer.CHUNKED: GroupKind.CHUNKED}
_PACKED_LATENT_BYTES = 656

# An indexer's key has one float32 scale per group of this many fp8 elements.
_SCALE_GROUP = 128

# These keys decide which layers reuse the tokens that an earlier layer's indexer selected.
_SHARING = ("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset", "indexer_types")

# DeepSeek V4: bytes and elements of a latent, and tokens per block of each kind of cache.
_LATENT_BYTES, _LATENT_WIDTH = 584, 512
_WINDOW_BLOCK, _STATE_BLOCK = 64, 256
_COMPRESSOR_BLOCK = {4: 4, 128: 8}
# At this ratio a state covers two runs of tokens, so the compressor keeps twice as many tokens and values per
# token.
_OVERLAPPING = 4


@dataclass(frozen=True, slots=True)
class AttentionReader:
    """Derives the caches of attention layers from a model's configuration.

    `cache_dtype` is one of `CACHE_DTYPES`, `model_dtype` a key of `FLOATS`.
    """

    config: ModelConfig
    family: ModelFamily
    cache_dtype: str
    model_dtype: str

    def stores(self, mixer: Mixer, layer: int) -> tuple[LayerCache, ...]:
        """Return the caches of one attention layer.

        The first one holds K and V per head, or an MLA latent. If the layer has a sparse-attention indexer, a
        second one holds the indexer's keys. A layer of DeepSeek V4 has up to five caches.

        Raises:
            ConfigError: a size is missing or invalid, or this attention does not support the element type.
        """
        if self.config.get("compress_ratios") is not None:
            return _compressed(self.config, layer, self.cache_dtype)
        if self.config.optional_int("kv_lora_rank") is not None and not self.family.expanded:
            return (self._latent(), *_token_indexer(self.config, layer))
        if self.cache_dtype == PACKED_LATENT:
            raise ConfigError(f"{PACKED_LATENT} is for latents (MLA); this model keeps K and V, choose fp8")
        item = element_bytes(self.cache_dtype, self.model_dtype)
        fields = []
        heads, k_width, v_width = self._heads(mixer, layer)
        for name, width in (("k", k_width), ("v", v_width)):
            fields.append(StoredField(name, item, heads, (("content", width),)))
            if self.cache_dtype in SCALED:
                fields.append(StoredField(f"{name}.scale", 4, heads))
        kept = LayerCache(_KINDS[mixer], self._attention_span(mixer, layer), tuple(fields))
        return (kept, *_block_indexer(self.config, layer, self.model_dtype))

    def _attention_span(self, mixer: Mixer, layer: int) -> int:
        if mixer is Mixer.SLIDING:
            if (each := self.config.listed("sliding_windows", self.config.layers)) is not None:
                return checked_int("sliding_windows", each[layer], 1)
            return self.config.number("sliding_window", "sliding_window_size") + self.family.window_offset
        return self.config.number("attention_chunk_size") if mixer is Mixer.CHUNKED else 0

    def _heads(self, mixer: Mixer, layer: int) -> tuple[int, int, int]:
        """Return (number of KV heads, elements per head of K, elements per head of V) of a layer."""
        config = self.config
        if self.family.expanded:
            # MiniCPM3 has latents, but vLLM caches the heads that are computed from them, K and V equally
            # wide.
            config.mark_read("kv_lora_rank", "head_dim", "v_head_dim", *_KV_HEADS)
            width = config.number("qk_nope_head_dim") + config.number("qk_rope_head_dim")
            return config.number(*_QUERY_HEADS), width, width
        if config.get("qk_rope_head_dim") == 0:
            config.mark_read("qk_rope_head_dim")  # DeepSeek-VL2-tiny: its class has latents, it has none
        heads, k_width = _layer_heads(config, layer), _head_width(config)
        v_width = config.optional_int("v_head_dim") or k_width
        if config.get("per_layer_config") is not None:
            config.mark_read("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v")
            overrides = layer_overrides(config).get(layer, {})
            heads = checked_int("num_key_value_heads", overrides.get("num_key_value_heads", heads), 1)
            if "head_dim" in overrides:
                k_width = v_width = checked_int("head_dim", overrides["head_dim"], 1)
        elif mixer is Mixer.SLIDING:
            # MiMo-V2 gives windows heads of their own.
            heads = config.optional_int("swa_num_key_value_heads") or heads
            k_width = config.optional_int("swa_head_dim") or k_width
            v_width = config.optional_int("swa_v_head_dim", "swa_head_dim") or v_width
            other = config.nested("attention_other_setting")
            if other.get("attention_type") == "sliding_attention":  # Step 3.5
                width = other.optional_int("head_dim") or 0
                heads = other.optional_int("num_attention_groups") or heads
                k_width, v_width = width or k_width, width or v_width
        elif (wide := config.optional_int("global_head_dim")) is not None:
            config.mark_read("num_global_key_value_heads", "attention_k_eq_v")
            # Gemma 4: layers without a window have wider heads, and fewer of them if K is also used as V.
            fewer = config.optional_int("num_global_key_value_heads")
            if fewer is not None and config.get("attention_k_eq_v") is True:
                heads = fewer
            k_width = v_width = wide
        return heads, k_width, v_width

    def _latent(self) -> LayerCache:
        if self.cache_dtype in SCALED:
            raise ConfigError(
                f"{self.cache_dtype} is for K and V; this model keeps latents (MLA), choose fp8"
            )
        # K and V heads are computed from the latent and are not cached.
        self.config.mark_read(*_KV_HEADS, "head_dim", "v_head_dim")
        width = self.config.number("kv_lora_rank") + self.config.number("qk_rope_head_dim")
        if self.cache_dtype == PACKED_LATENT:
            return _latents(GroupKind.MLA, "latent", _PACKED_LATENT_BYTES)
        item = element_bytes(self.cache_dtype, self.model_dtype)
        return _latents(GroupKind.MLA, "latent", width, item=item)


def query_heads(config: ModelConfig) -> int:
    """Return the number of query heads of the model; 0 if ``config.json`` does not give the number."""
    return config.optional_int(*_QUERY_HEADS) or 0


def without_attention(config: ModelConfig) -> set[int]:
    """Return the layers without attention, as in Nemotron-NAS. Raise ConfigError for an unknown attention."""
    blocks = config.listed("block_configs", config.layers) or ()
    skipped = set()
    for number, block in enumerate(blocks):
        attention = _nested_object(block, "attention")
        for name in ("replace_with_linear", "window_length", "num_sink_tokens", "sparsify"):
            if not attention.get("no_op") and attention.get(name):
                raise ConfigError(
                    f"config.json: block_configs has {name} for layer {number}; kvferry does not know "
                    "its KV cache"
                )
        if attention.get("no_op") or attention.get("replace_with_linear"):
            skipped.add(number)
    return skipped


def _layer_heads(config: ModelConfig, layer: int) -> int:
    blocks = config.listed("block_configs", config.layers)
    if blocks is not None:
        # Nemotron-NAS gives the query heads of the model, and how many share a KV head in each layer.
        config.mark_read(*_KV_HEADS)
        given = _nested_object(blocks[layer], "attention").get("n_heads_in_group")
        return config.number(*_QUERY_HEADS) // checked_int("n_heads_in_group", given, 1)
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        config.mark_read(*_KV_HEADS)
        return 1
    return config.optional_int(*_KV_HEADS) or config.number(*_QUERY_HEADS)


def _nested_object(block: Any, name: str) -> Mapping[str, Any]:
    inner = block.get(name) if isinstance(block, Mapping) else None
    if not isinstance(inner, Mapping):
        raise ConfigError(f"config.json: block_configs has an entry without {name}; add it to the file")
    return inner


def _head_width(config: ModelConfig) -> int:
    if width := config.optional_int("head_dim", "attention_head_dim", "kv_channels"):
        if config.optional_int("attention_head_dim"):
            config.mark_read("kv_channels")  # Zamba2: attention_head_dim is the width of its heads
        return width
    hidden, heads = config.number("hidden_size", "n_embd", "d_model"), config.number(*_QUERY_HEADS)
    if hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}; add head_dim"
        )
    return hidden // heads


def _token_indexer(config: ModelConfig, layer: int) -> tuple[LayerCache, ...]:
    """Return the cache of the sparse indexer in a layer of DeepSeek V3.2 or GLM-5, if it has one."""
    # As in vLLM's ``deepseek_v32/attention.py``.
    width = config.optional_int("index_head_dim")
    if width is None:
        return ()
    pattern = config.get("index_topk_pattern")
    every = config.optional_int("index_topk_freq") or 1
    offset = config.get("index_skip_topk_offset")
    config.mark_read(*_SHARING)
    if pattern is None:
        first = 2 if offset is None else checked_int("index_skip_topk_offset", offset, 0)
        shared = max(layer - first + 1, 0) % every != 0
    elif not isinstance(pattern, str | list):
        raise ConfigError(f"config.json: index_topk_pattern is {pattern!r}, a letter per layer is expected")
    else:
        shared = layer < len(pattern) and pattern[layer] == "S"
    types = config.listed("indexer_types", config.layers)
    if types is not None and (types[layer] == "shared") is not shared:
        raise ConfigError(
            f"config.json: indexer_types calls layer {layer} {types[layer]!r}, the other keys of its indexer "
            "say otherwise; correct the file"
        )
    return () if shared else (_latents(GroupKind.MLA, "indexer", _scaled_bytes(width)),)


def _scaled_bytes(width: int) -> int:
    """Return the bytes of an indexer's key: `width` fp8 elements and their scales."""
    return width + checked_int("index_head_dim", width, _SCALE_GROUP) // _SCALE_GROUP * 4


def _block_indexer(config: ModelConfig, layer: int, model_dtype: str) -> tuple[LayerCache, ...]:
    """Return the cache of the sparse indexer in a layer of MiniMax-M3, if it has one."""
    sparse = config.nested("sparse_attention_config")
    if not sparse.values or sparse.get("use_sparse_attention") is False:
        return ()
    listed = sparse.listed("sparse_attention_freq", config.layers)
    if listed is None:
        raise ConfigError("config.json: sparse_attention_config has no sparse_attention_freq; add it")
    if not listed[layer]:
        return ()
    width = sparse.number("sparse_index_dim")
    return (_latents(GroupKind.MLA, "indexer", width, item=FLOATS[model_dtype]),)


def _compressed(config: ModelConfig, layer: int, cache_dtype: str) -> tuple[LayerCache, ...]:
    """Return the caches of one layer of DeepSeek V4.

    Every layer has a window of latents. A layer with compression has two more caches: one for compressed
    states, and one for tokens that are not in a compressed state yet. If the compression ratio is 4, the
    layer's indexer also has these two.
    """
    # All three select the packed format, the only one.
    if cache_dtype not in ("auto", "fp8", PACKED_LATENT):
        raise ConfigError(f"element type {cache_dtype} is not known for compressed latents; choose fp8")
    ratios = config.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < config.layers:
        raise ConfigError(f"config.json: compress_ratios is {ratios!r}, one number per layer is expected")
    width = config.number("head_dim")
    if width != _LATENT_WIDTH:
        raise ConfigError(
            f"config.json: head_dim is {width}; kvferry knows compressed latents of {_LATENT_WIDTH} only"
        )
    index_width = config.number("index_head_dim")
    config.mark_read("num_key_value_heads", "qk_rope_head_dim", "kv_lora_rank")
    span = config.number("sliding_window")
    window = _latents(GroupKind.SLIDING, "latent", _LATENT_BYTES, _WINDOW_BLOCK, span)
    ratio = checked_int("compress_ratios", ratios[layer], 0)
    if ratio <= 1:
        return (window,)
    if ratio not in _COMPRESSOR_BLOCK:
        raise ConfigError(f"config.json: compress_ratios has {ratio}; known are 0, 4 and 128")
    kept = [window, _states("latent", _LATENT_BYTES, ratio), _compressor("compressor", width, ratio)]
    if ratio == _OVERLAPPING:
        kept += [
            _states("indexer", _scaled_bytes(index_width), ratio),
            _compressor("indexer.compressor", index_width, ratio),
        ]
    return tuple(kept)


def _states(name: str, size: int, ratio: int) -> LayerCache:
    return _latents(GroupKind.MLA, name, size, _STATE_BLOCK, ratio=ratio)


def _compressor(name: str, width: int, ratio: int) -> LayerCache:
    # Two float32 vectors per token, a sum and a weight.
    groups = 2 if ratio == _OVERLAPPING else 1
    return _latents(GroupKind.SLIDING, name, groups * 2 * width * 4, _COMPRESSOR_BLOCK[ratio], groups * ratio)


def _latents(
    kind: GroupKind,
    name: str,
    width: int,
    block: int = 0,
    attention_span: int = 0,
    *,
    ratio: int = 1,
    item: int = 1,
) -> LayerCache:
    """Return the cache of one vector per state of `ratio` tokens, which every rank holds whole."""
    field = StoredField(name, item, 0, (("content", width),))
    return LayerCache(kind, attention_span, (field,), block, ratio)
