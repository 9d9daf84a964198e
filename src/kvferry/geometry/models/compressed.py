"""The caches of a layer of DeepSeek V4: a window of latents, and one compressed state per 4 or 128 tokens.

Sizes and blocks are those of vLLM's ``deepseek_v4`` in its packed format. A latent has 448 bytes of fp8, 64
bfloat16 elements for positions and 8 bytes of scales. The keys of the indexer are fp8 with scales. A
compressor has a cache of float32 values for the tokens that are not in a compressed state yet.
"""

from __future__ import annotations

from kvferry.errors import ConfigError
from kvferry.geometry.models.config import ModelConfig, checked_int
from kvferry.geometry.models.dtypes import PACKED_LATENT
from kvferry.geometry.models.indexer import scaled_bytes
from kvferry.geometry.rank import GroupKind
from kvferry.geometry.store import LayerCache, StoredField

_LATENT_BYTES = 584
_LATENT_WIDTH = 512
_WINDOW_BLOCK, _STATE_BLOCK = 64, 256
_COMPRESSOR_BLOCK = {4: 4, 128: 8}
# At this ratio a state covers two runs of tokens, so the compressor keeps twice as many tokens and values per
# token.
_OVERLAPPING = 4


def compressed_stores(config: ModelConfig, layer: int, cache_dtype: str) -> tuple[LayerCache, ...]:
    """Return the caches of one layer of DeepSeek V4.

    Every layer has a window of latents. A layer with compression has two more caches: one for compressed
    states, and one for tokens that are not in a compressed state yet. If the compression ratio is 4, the
    layer's indexer also has these two.

    Args:
        cache_dtype: ``auto``, ``fp8`` or `PACKED_LATENT`. All three select the packed format, the only one.

    Raises:
        ConfigError: a key is missing or invalid, or the element type or the size of a latent is unsupported.
    """
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
    window = _latents(
        GroupKind.SLIDING, "latent", _LATENT_BYTES, _WINDOW_BLOCK, config.number("sliding_window")
    )
    ratio = checked_int("compress_ratios", ratios[layer], 0)
    if ratio <= 1:
        return (window,)
    if ratio not in _COMPRESSOR_BLOCK:
        raise ConfigError(f"config.json: compress_ratios has {ratio}; known are 0, 4 and 128")
    kept = [window, _states("latent", _LATENT_BYTES, ratio), _compressor("compressor", width, ratio)]
    if ratio == _OVERLAPPING:
        kept += [
            _states("indexer", scaled_bytes(index_width), ratio),
            _compressor("indexer.compressor", index_width, ratio),
        ]
    return tuple(kept)


def _states(name: str, size: int, ratio: int) -> LayerCache:
    return _latents(GroupKind.MLA, name, size, _STATE_BLOCK, 0, ratio)


def _compressor(name: str, width: int, ratio: int) -> LayerCache:
    # Two float32 vectors per token, a sum and a weight.
    groups = 2 if ratio == _OVERLAPPING else 1
    return _latents(GroupKind.SLIDING, name, groups * 2 * width * 4, _COMPRESSOR_BLOCK[ratio], groups * ratio)


def _latents(
    kind: GroupKind, name: str, size: int, block: int, attention_span: int, ratio: int = 1
) -> LayerCache:
    return LayerCache(kind, attention_span, (StoredField(name, 1, 0, (("content", size),)),), block, ratio)
