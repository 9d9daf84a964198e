"""What kvferry's connector knows of the pages of each layer: fields, or bytes that move whole.

A layer's attention backend decides it. Where no backend is requested, it is one that vLLM 0.32 chooses on a
CUDA machine for this cache and element type. Some models bring layers of their own, whatever is requested.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.errors import ConfigError
from kvferry.geometry import GroupKind
from kvferry.geometry.models import ModelReading, per_layer
from kvferry.geometry.store import LayerCache
from kvferry.tools.plan.backends import BackendPages, pages_of, takes
from kvferry.tools.plan.side import EngineSide

INDEXER = "indexer"
# Backend of the indexers of MLA models. It belongs to no attention layer, so the table does not list it.
LATENT_INDEXER = "DEEPSEEK_V32_INDEXER"
_COMPRESSED, _BLOCK_SPARSE = "FLASHMLA_SPARSE_DSV4", "MINIMAX_M3_SPARSE"
_LATENT, _SPARSE_LATENT = ("FLASHMLA", "FLASHINFER_MLA"), ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE")
_KV, _UNEQUAL_KV = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"), ("FLASH_ATTN_DIFFKV",)


def layer_pages(reading: ModelReading, side: EngineSide) -> tuple[BackendPages | None, ...]:
    """Return how the pages of each cache of a model move, in the order of `ModelCache.layers`.

    The entry of a recurrent state is None.

    Raises:
        ConfigError: the requested backend does not support the model's KV, the element type or the layout.
    """
    compressed = any(cache.state_tokens > 1 for cache in reading.cache.layers)
    found = list[BackendPages | None]()
    for caches in per_layer(reading):
        for cache in caches:
            # The layer's weight loaders prove the fields of recurrent state, not its backend.
            if cache.kind is GroupKind.STATE:
                found.append(None)
            elif compressed:
                found.append(_of_compressed(cache))
            else:
                found.append(_of_attention(cache, caches, reading.cache_dtype, side))
    return tuple(found)


def notes_of(pages: tuple[BackendPages | None, ...]) -> Iterator[str]:
    """Yield a sentence for each backend whose pages move whole."""
    for one in dict.fromkeys(pages):
        if one is not None and one.why_whole:
            yield (
                f"pages of {one.backend} move whole, between engines with equal blocks, layout and ranks, "
                f"and not into tiers: {one.why_whole}"
            )


def _of_compressed(cache: LayerCache) -> BackendPages:
    if cache.state_tokens > 1:
        return BackendPages(_COMPRESSED, why_whole=f"a state stands for {cache.state_tokens} tokens")
    return pages_of(_COMPRESSED, "auto", "")


def _of_attention(
    cache: LayerCache, layer: tuple[LayerCache, ...], dtype: str, side: EngineSide
) -> BackendPages:
    """Return how the pages of one cache of an attention layer move. `layer` has all caches of the layer."""
    indexed = any(_holds(one, INDEXER) for one in layer)
    latent = any(_holds(one, "latent") for one in layer)
    if indexed and not latent:
        return pages_of(_BLOCK_SPARSE, dtype, side.layout)
    if _holds(cache, INDEXER):
        return BackendPages(LATENT_INDEXER, (INDEXER,))
    if side.backend is not None:
        return _requested(side.backend, cache, dtype, side.layout)
    usual = _usual(cache, latent=latent, indexed=indexed)
    chosen = next((name for name in usual if takes(name, dtype)), None)
    if chosen is None:
        return BackendPages(usual[0], why_whole=f"no backend is known that takes KV cache dtype {dtype}")
    return pages_of(chosen, dtype, side.layout)


def _usual(cache: LayerCache, *, latent: bool, indexed: bool) -> tuple[str, ...]:
    """Return the backends that vLLM prefers for a cache, best first."""
    if latent:
        return _SPARSE_LATENT if indexed else _LATENT
    # One backend is made for K and V of different widths.
    widths = {field.head_bytes for field in cache.fields if field.name in ("k", "v")}
    return _UNEQUAL_KV if len(widths) > 1 else _KV


def _requested(backend: str, cache: LayerCache, dtype: str, layout: str) -> BackendPages:
    found = pages_of(backend, dtype, layout)
    kept = "latent" if _holds(cache, "latent") else "k and v"
    if found.fields and ("latent" in found.fields) != (kept == "latent"):
        raise ConfigError(
            f"{backend} keeps {' and '.join(found.fields)}, but this model keeps {kept}; choose another "
            "backend"
        )
    return found


def _holds(cache: LayerCache, name: str) -> bool:
    return any(field.name == name for field in cache.fields)
