"""The caches of sparse-attention indexers: one key per token, in a separate cache."""

from __future__ import annotations

from kvferry.errors import ConfigError
from kvferry.geometry.models.config import ModelConfig, checked_int
from kvferry.geometry.models.dtypes import FLOATS
from kvferry.geometry.rank import GroupKind
from kvferry.geometry.store import LayerCache, StoredField

_SCALE_TOKENS = 128
_SHARING = ("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset", "indexer_types")


def scaled_bytes(width: int) -> int:
    """Return the bytes of an indexer's key: `width` fp8 elements, and a float32 scale per 128 of them."""
    return width + checked_int("index_head_dim", width, _SCALE_TOKENS) // _SCALE_TOKENS * 4


def token_indexer(config: ModelConfig, layer: int) -> tuple[LayerCache, ...]:
    """Return the cache of the sparse-attention indexer in a layer of DeepSeek V3.2 or GLM-5, if it has one.

    The keys ``index_topk_pattern``, ``index_topk_freq`` and ``index_skip_topk_offset`` decide which layers
    reuse the tokens that an earlier layer's indexer selected, as in vLLM's ``deepseek_v32/attention.py``.

    Raises:
        ConfigError: a key of the indexer is invalid, or ``indexer_types`` contradicts these three keys.
    """
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
    if shared:
        return ()
    return (_keys(1, scaled_bytes(width)),)


def block_indexer(config: ModelConfig, layer: int, model_dtype: str) -> tuple[LayerCache, ...]:
    """Return the cache of the sparse-attention indexer in a layer of MiniMax-M3, if it has one.

    It holds one key vector per token for all heads.

    Args:
        model_dtype: element type of the keys, a key of `FLOATS`.

    Raises:
        ConfigError: ``sparse_attention_config`` has no list of sparse layers, or a key is invalid.
    """
    sparse = config.nested("sparse_attention_config")
    if not sparse.values or sparse.get("use_sparse_attention") is False:
        return ()
    listed = sparse.listed("sparse_attention_freq", config.layers)
    if listed is None:
        raise ConfigError("config.json: sparse_attention_config has no sparse_attention_freq; add it")
    if not listed[layer]:
        return ()
    return (_keys(FLOATS[model_dtype], sparse.number("sparse_index_dim")),)


def _keys(item_bytes: int, width: int) -> LayerCache:
    return LayerCache(GroupKind.MLA, 0, (StoredField("indexer", item_bytes, 0, (("content", width),)),))
