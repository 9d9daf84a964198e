"""Content adapters: the positions of K, V, latents and scales in each backend's pages.

An adapter describes a page: its fields, their positions, and the values that the backend's cache-write
operation leaves in them. `probe` compares this description with what the operation really writes. The first
adapter of a backend whose description is proved is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvferry.engines.vllm.content.strides import Shard, Strides
from kvferry.geometry import Axis, Field


class Code(Enum):
    """Number format in which the elements of a field are stored in a KV cache page."""

    ELEMENT = "the cache's element type"
    BFLOAT16 = "bfloat16, whatever the cache's element type is"
    E4M3 = "float8 e4m3, whatever the cache's element type is"
    FP4 = "two e2m1 numbers to a byte, the low half first"


@dataclass(frozen=True, slots=True)
class WrittenField:
    """Field of a page, with the part of K or V that the layer's cache-write operation stores in it.

    Attributes:
        scale: field with the scale factors of the elements; None if the page contains none. Every factor
            applies to the same number of consecutive elements.
        scaled: True if decoded elements must also be multiplied by the layer's own scale of K or V, which is
            stored outside of the cache.
    """

    field: Field
    source: str  # input that it stores: "k" (also for a latent) or "v"
    first: int = 0  # index of its first element in the input's vector for one head and token
    code: Code = Code.ELEMENT
    scale: Field | None = None
    scaled: bool = True


INDEX_GROUP = 128
"""Number of consecutive elements in a key of the sparse indexer that share one scale."""

_Loops = tuple[tuple[int, int], ...]
"""(count, stride in bytes) of each loop over an axis, outermost loop first."""
Adapter = Callable[[Strides, Shard], tuple[WrittenField, ...]]
"""Return the fields of a page, or an empty tuple if the tensor does not have the shape that is known."""


def fields_of(written: tuple[WrittenField, ...]) -> tuple[Field, ...]:
    """Return the fields of a page, each with its scale factors after it."""
    return tuple(field for one in written for field in (one.field, one.scale) if field is not None)


def packed_kv(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages of most GPU backends: for each head and token, the elements of K, then those of V."""
    if s.slots != s.heads or s.content != s.k + s.v:
        return ()
    # In DIFFKV backends, K and V have different numbers of elements.
    return _kv(_of_head(s, shard, "k", s.item, 0, s.k), _of_head(s, shard, "v", s.item, s.k * s.item, s.v))


def packed_kv_with_scales(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages of caches that are quantised per token and head: K, its float32 scale, V, its scale."""
    if s.slots != s.heads or s.content * s.item != (s.k + s.v) * s.item + 8:
        return ()
    k_bytes, v_bytes = s.k * s.item, s.v * s.item
    k_scale = _of_head(s, shard, "k.scale", 4, k_bytes, 1)
    v_scale = _of_head(s, shard, "v.scale", 4, k_bytes + 4 + v_bytes, 1)
    return (
        WrittenField(_of_head(s, shard, "k", s.item, 0, s.k), "k", scale=k_scale, scaled=False),
        WrittenField(_of_head(s, shard, "v", s.item, k_bytes + 4, s.v), "v", scale=v_scale, scaled=False),
    )


def latent(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages of MLA, which hold one latent vector per token."""
    del shard
    if s.content != s.k or s.v:
        return ()
    return (WrittenField(_of_token(s, "latent", s.item, 0, s.content), "k"),)


def latent_with_scales(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages of the KV cache dtype ``fp8_ds_mla``.

    A token has 512 fp8 codes of the latent, 4 float32 scales of these codes, and 64 bfloat16 rope values.
    """
    del shard
    if (s.content * s.item, s.k, s.v) != (656, 576, 0):
        return ()
    scale = _of_token(s, "latent.scale", 4, 512, 4)
    return (
        WrittenField(_of_token(s, "latent", 1, 0, 512), "k", scale=scale, scaled=False),
        WrittenField(_of_token(s, "rope", 2, 528, 64), "k", 512, Code.BFLOAT16, scaled=False),
    )


def indexer(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages of DeepSeek V3.2's sparse indexer, which `indexer_k_quant_and_cache` writes.

    A kernel block holds first the fp8 keys of all its tokens, then their float32 scales.
    """
    del shard
    groups, rest = divmod(s.content, INDEX_GROUP + 4)
    if rest or s.v or (s.slots, s.item) != (1, 1) or s.token != s.content:
        return ()
    # The tensor shows a token's key and scales side by side, but they are not.
    keys = groups * INDEX_GROUP
    scale = _field(s, "indexer.scale", 4, s.tokens * keys, ((s.tokens, groups * 4),), ((groups, 4),))
    codes = _field(s, "indexer", 1, 0, ((s.tokens, keys),), ((keys, 1),))
    return (WrittenField(codes, "k", code=Code.E4M3, scale=scale, scaled=False),)


def cpu_kv(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages of CPU_ATTN's vector kernels: for each head, K of ``[D][tokens]``, V of ``[tokens][D]``.

    ``D`` is the head size.
    """
    if s.slots != s.heads or s.content != s.k + s.v:
        return ()
    heads, v = _heads(s, shard, s.slot), s.tokens * s.k * s.item
    return _kv(
        _field(s, "k", s.item, 0, ((s.tokens, s.item),), ((s.k, s.tokens * s.item),), heads),
        _field(s, "v", s.item, v, ((s.tokens, s.v * s.item),), ((s.v, s.item),), heads),
    )


def amx_kv(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages of CPU_ATTN's kernels for AMX, which hold a K array and then a V array for each head.

    Both consist of pairs, as AMX multiplies them: two elements of a token in K, an element of two tokens in
    V. Sixteen pairs form a row of a tile. With heads of ``D`` elements, K has the shape
    ``[tokens / 16][D / 2][16 tokens][2]``, and V has ``[D / 16][tokens / 2][16][2 tokens]``.
    """
    if s.slots != s.heads or s.content != s.k + s.v or s.tokens % 16 or s.k % 2 or s.v % 16:
        return ()
    pair, row = 2 * s.item, 32 * s.item
    heads, v = _heads(s, shard, s.slot), s.tokens * s.k * s.item
    k_tokens, k_content = ((s.tokens // 16, s.k // 2 * row), (16, pair)), ((s.k // 2, row), (2, s.item))
    v_tokens, v_content = ((s.tokens // 2, row), (2, s.item)), ((s.v // 16, s.tokens // 2 * row), (16, pair))
    return _kv(
        _field(s, "k", s.item, 0, k_tokens, k_content, heads),
        _field(s, "v", s.item, v, v_tokens, v_content, heads),
    )


def planes(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages of the backend B12X: for each token K of all heads, then for each token V of all heads.

    The cache tensor shows these two arrays as the two entries of its head axis.
    """
    if s.slots != 2 or s.content != s.heads * s.k or s.k != s.v:
        return ()
    heads, tokens, content = _heads(s, shard, s.k * s.item), ((s.tokens, s.token),), ((s.k, s.item),)
    return _kv(
        _field(s, "k", s.item, 0, tokens, content, heads),
        _field(s, "v", s.item, s.slot, tokens, content, heads),
    )


def nvfp4(k_swizzled: bool, v_swizzled: bool) -> Adapter:
    """Return an adapter for NVFP4 pages, whose scales of K or V may be swizzled.

    A page holds the packed codes of K of all heads, one e4m3 scale per group of 16 elements, and then the
    same of V. The scales of a head form an array with a row per token and ``G`` columns, one per group.
    Kernels for data-centre Blackwell swizzle the scales of every 4 tokens. The scale of token ``t`` and group
    ``g`` is then in row ``t // 4 * 4 + g // (G / 4)`` and in column ``g % (G / 4) * 4 + t % 4``.
    """

    def adapter(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
        data, groups = s.k // 2, s.k // 16
        if s.slots != 2 * s.heads or s.item != 1 or s.k % 64 or s.k != s.v or s.content != data + groups:
            return ()
        page = s.slots * s.tokens * s.content
        if (s.slot, s.token) not in ((s.tokens * s.content, s.content), (s.content, s.slots * s.content)):
            return ()
        # Swizzled scales come in fours. A kernel block is contiguous, and its codes and scales are dense.
        if s.tokens % 4 or (s.kernel_blocks > 1 and s.kernel < page):
            return ()
        # The codes of K (or V) are dense, and so are the scales. The tensor tells which axis is outermost.
        head, token = (s.tokens, 1) if s.slot > s.token else (1, s.heads)
        side = s.heads * s.tokens * s.content
        found = []
        for name, start, swizzled in (("k", 0, k_swizzled), ("v", side, v_swizzled)):
            columns: _Loops = ((groups, 1),)
            rows: _Loops = ((s.tokens, token * groups),)
            if swizzled:
                columns = ((4, token * groups), (groups // 4, 4))
                rows = ((s.tokens // 4, 4 * token * groups), (4, 1))
            scales, heads = start + s.heads * s.tokens * data, _heads(s, shard, head * groups)
            scale = _field(s, f"{name}.scale", 1, scales, rows, columns, heads)
            heads = _heads(s, shard, head * data)
            codes = _field(s, name, 1, start, ((s.tokens, token * data),), ((data, 1),), heads)
            found.append(WrittenField(codes, name, code=Code.FP4, scale=scale))
        return tuple(found)

    return adapter


def _kv(k: Field, v: Field) -> tuple[WrittenField, ...]:
    return WrittenField(k, "k"), WrittenField(v, "v")


def _field(
    s: Strides,
    name: str,
    item: int,
    offset: int,
    tokens: _Loops,
    content: _Loops,
    heads: Axis | None = None,
) -> Field:
    """Return a field of a page, from loops over the tokens of a kernel block and over a token's elements."""
    axes = (Axis("token", ((s.kernel_blocks, s.kernel), *tokens)), Axis("content", content))
    return Field(name, item, offset, axes if heads is None else (heads, *axes))


def _heads(s: Strides, shard: Shard, stride: int) -> Axis:
    return Axis("head", ((s.heads, stride),), shard.start, shard.total)


def _of_token(s: Strides, name: str, item: int, offset: int, count: int) -> Field:
    return _field(s, name, item, offset, ((s.tokens, s.token),), ((count, item),))


def _of_head(s: Strides, shard: Shard, name: str, item: int, offset: int, count: int) -> Field:
    tokens, content = ((s.tokens, s.token),), ((count, item),)
    return _field(s, name, item, offset, tokens, content, _heads(s, shard, s.slot))


_NVFP4 = tuple(nvfp4(*swizzled) for swizzled in ((False, True), (False, False), (True, True)))
_PACKED = (
    "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLEX_ATTENTION", "ROCM_AITER_UNIFIED_ATTN", "TRITON_ATTN_DIFFKV",
)  # fmt: skip
_LATENT = (
    "AITER_TRITON_MLA", "AMX_MLA", "CPU_MLA", "CUTLASS_MLA", "FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE",
    "FLASHINFER_MLA_SPARSE_SM120", "FLASHINFER_MLA_SPARSE_SM90", "FLASHMLA", "FLASHMLA_SPARSE",
    "FLASH_ATTN_MLA", "FLASH_ATTN_MLA_SPARSE", "ROCM_AITER_MLA", "ROCM_AITER_MLA_SPARSE", "TOKENSPEED_MLA",
    "TRITON_MLA", "XPU_MLA_SPARSE",
)  # fmt: skip
ADAPTERS: dict[str, tuple[Adapter, ...]] = {
    **dict.fromkeys(_PACKED, (packed_kv,)),
    **dict.fromkeys(_LATENT, (latent, latent_with_scales)),
    "B12X": (planes,),
    "CPU_ATTN": (cpu_kv, amx_kv),
    "DEEPSEEK_V32_INDEXER": (indexer,),
    "FLASHINFER": (packed_kv, *_NVFP4),
    "TRITON_ATTN": (packed_kv, packed_kv_with_scales),
    "TRITON_FLASH_ATTN": (packed_kv, packed_kv_with_scales),
    "TRITON_FLASHINFER": (packed_kv, *_NVFP4),
}
"""Adapters by name of the attention backend, in the order in which they are tried. Pages of backends that are
not listed may still be described by `cells`."""
