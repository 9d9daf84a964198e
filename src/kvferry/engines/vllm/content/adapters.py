"""Content adapters: the positions of K, V, latents and scales in each backend's pages.

An adapter is a function that describes a page: its fields, their positions, and the values that the backend's
cache-write operation leaves in them. `probe` compares this description with what the operation really writes.
If the page does not have the shape that an adapter knows, the adapter returns an empty tuple. A backend may
have several adapters. The first one whose description is proved is used.
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
    """Field of a KV cache page, with the part of K or V that the layer's cache-write operation stores in it.

    Attributes:
        field: name of the field, and positions of its elements in the page.
        source: input of the cache-write operation that the field stores: ``k`` (also for a latent) or ``v``.
        first: index of the field's first element in the input's vector for one head and token. It is 0
            unless the input is split into several fields.
        code: number format of the elements.
        scale: field with the scale factors of the elements; None if the page contains none. Every factor
            applies to the same number of consecutive elements.
        scaled: True if decoded elements must also be multiplied by the layer's own scale of K or V, which is
            stored outside of the cache. The scale is 1 for layers whose cache is not quantised.
    """

    field: Field
    source: str
    first: int = 0
    code: Code = Code.ELEMENT
    scale: Field | None = None
    scaled: bool = True


INDEX_GROUP = 128
"""Number of consecutive elements in a key of the sparse indexer that share one scale."""

Loops = tuple[tuple[int, int], ...]
Adapter = Callable[[Strides, Shard], tuple[WrittenField, ...]]


def fields_of(written: tuple[WrittenField, ...]) -> tuple[Field, ...]:
    """Return the fields of a page as one tuple, in which each field's scale factors, if any, come after it.

    Args:
        written: fields of the page, with the input that each stores.
    """
    return tuple(field for one in written for field in (one.field, one.scale) if field is not None)


# -- one stretch of bytes per head and token ---------------------------------------------------------------


def packed_kv(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages that hold, for each head and token, the elements of K and then the elements of V.

    Most GPU backends use such pages. In DIFFKV backends, K and V have different numbers of elements.

    Args:
        s: shape and strides of the layer's cache tensor.
        shard: range of the layer's KV heads that this rank holds.

    Returns:
        Fields of the page; empty if the shape of the layer's cache tensor does not fit this description.
    """
    if s.slots != s.heads or s.content != s.k + s.v:
        return ()
    return _in_cell(s, shard, [("k", 0, s.item, s.k), ("v", s.k * s.item, s.item, s.v)])


def packed_kv_with_scales(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages that hold, for each head and token, K, its float32 scale, V and its float32 scale.

    Backends use such pages for caches that are quantised per token and head.

    Args:
        s: shape and strides of the layer's cache tensor.
        shard: range of the layer's KV heads that this rank holds.

    Returns:
        Fields of the page; empty if the shape of the layer's cache tensor does not fit this description.
    """
    if s.slots != s.heads or s.content * s.item != (s.k + s.v) * s.item + 8:
        return ()
    v = s.k * s.item + 4
    k_codes, k_scale, v_codes, v_scale = (
        one.field
        for one in _in_cell(
            s,
            shard,
            [
                ("k", 0, s.item, s.k),
                ("k.scale", v - 4, 4, 1),
                ("v", v, s.item, s.v),
                ("v.scale", v + s.v * s.item, 4, 1),
            ],
        )
    )
    return (
        WrittenField(k_codes, "k", scale=k_scale, scaled=False),
        WrittenField(v_codes, "v", scale=v_scale, scaled=False),
    )


def latent(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages of MLA, which hold one latent vector per token. All ranks hold the same vectors.

    Args:
        s: shape and strides of the layer's cache tensor.
        shard: range of the layer's KV heads that this rank holds.

    Returns:
        Fields of the page; empty if the shape of the layer's cache tensor does not fit this description.
    """
    del shard
    if s.content != s.k or s.v:
        return ()
    return (WrittenField(_of_token(s, "latent", 0, s.item, s.content), "k"),)


def latent_with_scales(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages of the KV cache dtype ``fp8_ds_mla``, which hold 656 bytes per token.

    The bytes are 512 fp8 codes of the latent, 4 float32 scales of these codes, and 64 bfloat16 rope values.

    Args:
        s: shape and strides of the layer's cache tensor.
        shard: range of the layer's KV heads that this rank holds.

    Returns:
        Fields of the page; empty if the shape of the layer's cache tensor does not fit this description.
    """
    del shard
    if (s.content * s.item, s.k, s.v) != (656, 576, 0):
        return ()
    scale = _of_token(s, "latent.scale", 512, 4, 4)
    return (
        WrittenField(_of_token(s, "latent", 0, 1, 512), "k", scale=scale, scaled=False),
        WrittenField(_of_token(s, "rope", 528, 2, 64), "k", 512, Code.BFLOAT16, scaled=False),
    )


def indexer(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages of DeepSeek V3.2's sparse indexer, which hold one fp8 key per token and its scales.

    A kernel block (the block of tokens that the attention kernel uses) holds first the keys of all its
    tokens, then the scales of all its tokens. Each float32 scale belongs to 128 elements of a key. The
    operation `indexer_k_quant_and_cache` writes this format.

    Args:
        s: shape and strides of the layer's cache tensor.
        shard: range of the layer's KV heads that this rank holds.

    Returns:
        Fields of the page; empty if the shape of the layer's cache tensor does not fit this description.
    """
    del shard
    groups, rest = divmod(s.content, INDEX_GROUP + 4)
    if rest or s.v or (s.slots, s.item) != (1, 1) or s.token != s.content:
        return ()
    keys = groups * INDEX_GROUP

    def field(name: str, item: int, offset: int, count: int) -> Field:
        tokens = Axis("token", ((s.kernel_blocks, s.kernel), (s.tokens, count * item)))
        return Field(name, item, offset, (tokens, Axis("content", ((count, item),))))

    scale = field("indexer.scale", 4, s.tokens * keys, groups)
    codes = field("indexer", 1, 0, keys)
    return (WrittenField(codes, "k", code=Code.E4M3, scale=scale, scaled=False),)


# -- K and V apart -----------------------------------------------------------------------------------------


def cpu_kv(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages of CPU_ATTN's vector kernels, which hold a K array and then a V array for each head.

    The K array has the shape ``[D][tokens]``. The V array has the shape ``[tokens][D]``. ``D`` is the head
    size.

    Args:
        s: shape and strides of the layer's cache tensor.
        shard: range of the layer's KV heads that this rank holds.

    Returns:
        Fields of the page; empty if the shape of the layer's cache tensor does not fit this description.
    """
    if s.slots != s.heads or s.content != s.k + s.v:
        return ()
    heads = Axis("head", ((s.heads, s.slot),), shard.start, shard.total)
    k_tokens = Axis("token", ((s.kernel_blocks, s.kernel), (s.tokens, s.item)))
    v_tokens = Axis("token", ((s.kernel_blocks, s.kernel), (s.tokens, s.v * s.item)))
    k_content = Axis("content", ((s.k, s.tokens * s.item),))
    v_content = Axis("content", ((s.v, s.item),))
    return (
        WrittenField(Field("k", s.item, 0, (heads, k_tokens, k_content)), "k"),
        WrittenField(Field("v", s.item, s.tokens * s.k * s.item, (heads, v_tokens, v_content)), "v"),
    )


def amx_kv(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages of CPU_ATTN's kernels for AMX, which hold a K array and then a V array for each head.

    Both arrays consist of pairs, as AMX multiplies them: two elements of a token in K, an element of two
    tokens in V. Sixteen pairs form a row of a tile. The K array has the shape
    ``[tokens / 16][D / 2][16 tokens][2]``. The V array has the shape ``[D / 16][tokens / 2][16][2 tokens]``.
    ``D`` is the head size.

    Args:
        s: shape and strides of the layer's cache tensor.
        shard: range of the layer's KV heads that this rank holds.

    Returns:
        Fields of the page; empty if the shape of the layer's cache tensor does not fit this description.
    """
    if s.slots != s.heads or s.content != s.k + s.v or s.tokens % 16 or s.k % 2 or s.v % 16:
        return ()
    pair, row = 2 * s.item, 32 * s.item
    heads = Axis("head", ((s.heads, s.slot),), shard.start, shard.total)
    k_tokens = Axis("token", ((s.kernel_blocks, s.kernel), (s.tokens // 16, s.k // 2 * row), (16, pair)))
    v_tokens = Axis("token", ((s.kernel_blocks, s.kernel), (s.tokens // 2, row), (2, s.item)))
    k_content = Axis("content", ((s.k // 2, row), (2, s.item)))
    v_content = Axis("content", ((s.v // 16, s.tokens // 2 * row), (16, pair)))
    return (
        WrittenField(Field("k", s.item, 0, (heads, k_tokens, k_content)), "k"),
        WrittenField(Field("v", s.item, s.tokens * s.k * s.item, (heads, v_tokens, v_content)), "v"),
    )


def planes(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
    """Describe pages of the backend B12X, which hold one array for K and then one array for V.

    Each array holds the elements of all heads for each token. The cache tensor shows the two arrays as the
    two entries of its head axis.

    Args:
        s: shape and strides of the layer's cache tensor.
        shard: range of the layer's KV heads that this rank holds.

    Returns:
        Fields of the page; empty if the shape of the layer's cache tensor does not fit this description.
    """
    if s.slots != 2 or s.content != s.heads * s.k or s.k != s.v:
        return ()
    heads = Axis("head", ((s.heads, s.k * s.item),), shard.start, shard.total)
    axes = (heads, _tokens(s), Axis("content", ((s.k, s.item),)))
    return (
        WrittenField(Field("k", s.item, 0, axes), "k"),
        WrittenField(Field("v", s.item, s.slot, axes), "v"),
    )


def nvfp4(k_swizzled: bool, v_swizzled: bool) -> Adapter:
    """Return an adapter (function that describes a page's fields) for NVFP4 pages.

    A page holds K of all heads, and then V of all heads. K and V each consist of the packed codes of all
    heads, followed by one e4m3 scale per group of 16 elements. The scales of a head form an array with a row
    per token and ``G`` columns, one per group. Kernels for data-centre Blackwell swizzle the scales of every
    4 tokens. The scale of token ``t`` and group ``g`` is then in row ``t // 4 * 4 + g // (G / 4)`` and in
    column ``g % (G / 4) * 4 + t % 4``.

    Args:
        k_swizzled: True if the scales of K are swizzled.
        v_swizzled: True if the scales of V are swizzled.
    """

    def adapter(s: Strides, shard: Shard) -> tuple[WrittenField, ...]:
        data, groups = s.k // 2, s.k // 16
        if s.slots != 2 * s.heads or s.item != 1 or s.k % 64 or s.k != s.v or s.content != data + groups:
            return ()
        page = s.slots * s.tokens * s.content
        if (s.slot, s.token) not in ((s.tokens * s.content, s.content), (s.content, s.slots * s.content)):
            return ()
        if s.tokens % 4 or (s.kernel_blocks > 1 and s.kernel < page):
            return ()
        # The codes of K (or V) are dense, and so are the scales. The tensor tells which axis is outermost.
        rows = (s.tokens, 1) if s.slot > s.token else (1, s.heads)
        side = s.heads * s.tokens * s.content
        found = []
        for name, start, swizzled in (("k", 0, k_swizzled), ("v", side, v_swizzled)):
            scales = start + s.heads * s.tokens * data
            columns: Loops = ((groups, 1),)
            tokens: Loops = ((s.tokens, rows[1] * groups),)
            if swizzled:
                columns = ((4, rows[1] * groups), (groups // 4, 4))
                tokens = ((s.tokens // 4, 4 * rows[1] * groups), (4, 1))
            found.append(
                WrittenField(
                    _field(
                        s,
                        shard=shard,
                        name=name,
                        offset=start,
                        head=rows[0] * data,
                        tokens=((s.tokens, rows[1] * data),),
                        content=((data, 1),),
                    ),
                    name,
                    code=Code.FP4,
                    scale=_field(
                        s,
                        shard=shard,
                        name=f"{name}.scale",
                        offset=scales,
                        head=rows[0] * groups,
                        tokens=tokens,
                        content=columns,
                    ),
                )
            )
        return tuple(found)

    return adapter


# -- their parts -------------------------------------------------------------------------------------------


def _tokens(s: Strides) -> Axis:
    return Axis("token", ((s.kernel_blocks, s.kernel), (s.tokens, s.token)))


def _of_token(s: Strides, name: str, offset: int, item: int, count: int) -> Field:
    """Describe a field of a page that has one vector per token, shared by all heads.

    Args:
        s: shape and strides of the layer's cache tensor.
        name: name of the field.
        offset: byte offset of the field within a token's bytes.
        item: bytes per element.
        count: number of elements per token.
    """
    return Field(name, item, offset, (_tokens(s), Axis("content", ((count, item),))))


def _in_cell(s: Strides, shard: Shard, parts: list[tuple[str, int, int, int]]) -> tuple[WrittenField, ...]:
    """Describe the fields of a page that holds one contiguous range of bytes for each head and token.

    Args:
        s: shape and strides of the layer's cache tensor.
        shard: range of the layer's KV heads that this rank holds.
        parts: (name, byte offset in the range, bytes per element, number of elements) of each field.
    """
    heads = Axis("head", ((s.heads, s.slot),), shard.start, shard.total)
    return tuple(
        WrittenField(Field(name, item, offset, (heads, _tokens(s), Axis("content", ((count, item),)))), name)
        for name, offset, item, count in parts
    )


def _field(
    s: Strides,
    shard: Shard,
    name: str,
    offset: int,
    head: int,
    tokens: Loops,
    content: Loops,
) -> Field:
    """Describe a field of a page whose elements are single bytes.

    Args:
        s: shape and strides of the layer's cache tensor.
        shard: range of the layer's KV heads that this rank holds.
        name: name of the field.
        offset: byte offset of the field in the page.
        head: bytes from one head to the next.
        tokens: (count, stride in bytes) of each loop over the tokens of a kernel block (block of tokens that
            the attention kernel uses), outermost loop first.
        content: (count, stride in bytes) of each loop over the bytes of a head and token, outermost loop
            first.
    """
    heads = Axis("head", ((s.heads, head),), shard.start, shard.total)
    return Field(
        name,
        1,
        offset,
        (heads, Axis("token", ((s.kernel_blocks, s.kernel), *tokens)), Axis("content", content)),
    )


# -- adapters by backend -----------------------------------------------------------------------------------

_NVFP4 = tuple(nvfp4(*swizzled) for swizzled in ((False, True), (False, False), (True, True)))
_MLA = (latent, latent_with_scales)

ADAPTERS: dict[str, tuple[Adapter, ...]] = {
    "AITER_TRITON_MLA": _MLA,
    "AMX_MLA": _MLA,
    "B12X": (planes,),
    "CPU_ATTN": (cpu_kv, amx_kv),
    "CPU_MLA": _MLA,
    "CUTLASS_MLA": _MLA,
    "DEEPSEEK_V32_INDEXER": (indexer,),
    "FLASHINFER": (packed_kv, *_NVFP4),
    "FLASHINFER_MLA": _MLA,
    "FLASHINFER_MLA_SPARSE": _MLA,
    "FLASHINFER_MLA_SPARSE_SM120": _MLA,
    "FLASHINFER_MLA_SPARSE_SM90": _MLA,
    "FLASHMLA": _MLA,
    "FLASHMLA_SPARSE": _MLA,
    "FLASH_ATTN": (packed_kv,),
    "FLASH_ATTN_DIFFKV": (packed_kv,),
    "FLASH_ATTN_MLA": _MLA,
    "FLASH_ATTN_MLA_SPARSE": _MLA,
    "FLEX_ATTENTION": (packed_kv,),
    "ROCM_AITER_MLA": _MLA,
    "ROCM_AITER_MLA_SPARSE": _MLA,
    "ROCM_AITER_UNIFIED_ATTN": (packed_kv,),
    "TOKENSPEED_MLA": _MLA,
    "TRITON_ATTN": (packed_kv, packed_kv_with_scales),
    "TRITON_ATTN_DIFFKV": (packed_kv,),
    "TRITON_FLASH_ATTN": (packed_kv, packed_kv_with_scales),
    "TRITON_FLASHINFER": (packed_kv, *_NVFP4),
    "TRITON_MLA": _MLA,
    "XPU_MLA_SPARSE": _MLA,
}
"""Adapters by name of the attention backend, in the order in which they are tried. Pages of backends that are
not listed may still be described by `cells`."""


def is_known(backend: str) -> bool:
    """Return True if kvferry has descriptions (fields and positions) of the pages of an attention backend.

    A layer's pages are moved field by field if a check confirms one of the descriptions for the layer.

    Args:
        backend: name of the attention backend.
    """
    return backend in ADAPTERS
