"""The cache of an attention layer: K and V per head or one MLA latent, and the keys of an indexer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.errors import ConfigError
from kvferry.geometry.models.compressed import compressed_stores
from kvferry.geometry.models.config import ModelConfig, checked_int
from kvferry.geometry.models.dtypes import PACKED_LATENT, SCALED, element_bytes
from kvferry.geometry.models.families import Mixer, ModelFamily
from kvferry.geometry.models.indexer import block_indexer, token_indexer
from kvferry.geometry.models.overrides import layer_overrides
from kvferry.geometry.rank import GroupKind
from kvferry.geometry.store import LayerCache, StoredField

_PACKED_LATENT_BYTES = 656
_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "num_attention_groups",
)
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KINDS = {
    Mixer.FULL: GroupKind.FULL,
    Mixer.SLIDING: GroupKind.SLIDING,
    Mixer.CHUNKED: GroupKind.CHUNKED,
}


@dataclass(frozen=True, slots=True)
class AttentionReader:
    """Derives the caches of attention layers from a model's configuration.

    Attributes:
        cache_dtype: element type of the KV cache, one of `CACHE_DTYPES`.
        model_dtype: element type that the model computes in, a key of `FLOATS`.
    """

    config: ModelConfig
    family: ModelFamily
    cache_dtype: str
    model_dtype: str

    def stores(self, mixer: Mixer, layer: int) -> tuple[LayerCache, ...]:
        """Return the caches of one attention layer.

        The first one holds K and V per head, or an MLA latent. If the layer has a sparse-attention indexer, a
        second one holds the indexer's keys. A layer of DeepSeek V4 has up to five caches.

        Args:
            mixer: FULL, SLIDING or CHUNKED.

        Raises:
            ConfigError: a size is missing or invalid, or this attention does not support the element type.
        """
        if self.config.get("compress_ratios") is not None:
            return compressed_stores(self.config, layer, self.cache_dtype)
        if self.config.optional_int("kv_lora_rank") is not None and not self.family.expanded:
            return (self._latent(), *token_indexer(self.config, layer))
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
        return (kept, *block_indexer(self.config, layer, self.model_dtype))

    def _attention_span(self, mixer: Mixer, layer: int) -> int:
        if mixer is Mixer.SLIDING:
            if (each := self.config.listed("sliding_windows", self.config.layers)) is not None:
                return checked_int("sliding_windows", each[layer], 1)
            return self.config.number("sliding_window", "sliding_window_size") + self.family.window_offset
        return self.config.number("attention_chunk_size") if mixer is Mixer.CHUNKED else 0

    def _heads(self, mixer: Mixer, layer: int) -> tuple[int, int, int]:
        """Return (number of KV heads, elements per head of K, elements per head of V) of a layer."""
        if self.family.expanded:
            # MiniCPM3 has latents, but vLLM caches the heads that are computed from them, K and V equally
            # wide.
            self.config.mark_read("kv_lora_rank", "head_dim", "v_head_dim", *_KV_HEADS)
            width = self.config.number("qk_nope_head_dim") + self.config.number("qk_rope_head_dim")
            return self.config.number(*_QUERY_HEADS), width, width
        if self.config.get("qk_rope_head_dim") == 0:
            self.config.mark_read("qk_rope_head_dim")  # DeepSeek-VL2-tiny: its class has latents, it has none
        heads, k_width = self._layer_heads(layer), _head_width(self.config)
        v_width = self.config.optional_int("v_head_dim") or k_width
        if self.config.get("per_layer_config") is not None:
            self.config.mark_read("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v")
            overrides = layer_overrides(self.config).get(layer, {})
            heads = checked_int("num_key_value_heads", overrides.get("num_key_value_heads", heads), 1)
            if "head_dim" in overrides:
                k_width = v_width = checked_int("head_dim", overrides["head_dim"], 1)
            return heads, k_width, v_width
        if mixer is Mixer.SLIDING:
            # MiMo-V2 gives windows heads of their own.
            heads = self.config.optional_int("swa_num_key_value_heads") or heads
            k_width = self.config.optional_int("swa_head_dim") or k_width
            v_width = self.config.optional_int("swa_v_head_dim", "swa_head_dim") or v_width
            return _of_step(self.config, heads, k_width, v_width)
        if (wide := self.config.optional_int("global_head_dim")) is not None:
            self.config.mark_read("num_global_key_value_heads", "attention_k_eq_v")
            # Gemma 4: layers without a window have wider heads, and fewer of them if K is also used as V.
            fewer = self.config.optional_int("num_global_key_value_heads")
            if fewer is not None and self.config.get("attention_k_eq_v") is True:
                heads = fewer
            return heads, wide, wide
        return heads, k_width, v_width

    def _layer_heads(self, layer: int) -> int:
        config = self.config
        blocks = config.listed("block_configs", config.layers)
        if blocks is not None:
            # Nemotron-NAS gives the query heads of the model, and how many share a KV head in each layer.
            config.mark_read(*_KV_HEADS)
            shared = checked_int(
                "n_heads_in_group", _nested_object(blocks[layer], "attention").get("n_heads_in_group"), 1
            )
            return config.number(*_QUERY_HEADS) // shared
        if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
            config.mark_read(*_KV_HEADS)
            return 1
        return config.optional_int(*_KV_HEADS) or config.number(*_QUERY_HEADS)

    def _latent(self) -> LayerCache:
        """Return the cache of an MLA latent, which all heads share and every rank holds whole."""
        if self.cache_dtype in SCALED:
            raise ConfigError(
                f"{self.cache_dtype} is for K and V; this model keeps latents (MLA), choose fp8"
            )
        # K and V heads are computed from the latent and are not cached.
        self.config.mark_read(*_KV_HEADS, "head_dim", "v_head_dim")
        width = self.config.number("kv_lora_rank") + self.config.number("qk_rope_head_dim")
        latent = StoredField(
            "latent", element_bytes(self.cache_dtype, self.model_dtype), 0, (("content", width),)
        )
        if self.cache_dtype == PACKED_LATENT:
            latent = StoredField("latent", 1, 0, (("content", _PACKED_LATENT_BYTES),))
        return LayerCache(GroupKind.MLA, 0, (latent,))


def query_heads(config: ModelConfig) -> int:
    """Return the number of query heads of the model; 0 if ``config.json`` does not give the number."""
    return config.optional_int(*_QUERY_HEADS) or 0


def without_attention(config: ModelConfig) -> set[int]:
    """Return the indices of the layers that have no attention, as in Nemotron-NAS.

    Raises:
        ConfigError: a layer has a kind of attention whose cache is unknown.
    """
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


def _nested_object(block: Any, name: str) -> Mapping[str, Any]:
    inner = block.get(name) if isinstance(block, Mapping) else None
    if not isinstance(inner, Mapping):
        raise ConfigError(f"config.json: block_configs has an entry without {name}; add it to the file")
    return inner


def _of_step(config: ModelConfig, heads: int, k_width: int, v_width: int) -> tuple[int, int, int]:
    """Return the heads and widths of a sliding-window layer, which differ from others' in Step 3.5."""
    other = config.nested("attention_other_setting")
    if not other.values or other.get("attention_type") != "sliding_attention":
        return heads, k_width, v_width
    width = other.optional_int("head_dim")
    return other.optional_int("num_attention_groups") or heads, width or k_width, width or v_width


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
