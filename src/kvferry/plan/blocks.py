"""Block sizes and KV cache groups, as vLLM 0.32 derives them on a CUDA machine.

All groups share the same blocks of memory, because a block id belongs to one group at a time. If layers have
different caches, vLLM makes their pages equally large, in this order:

1. It increases the block size until an attention page is at least as large as a snapshot of recurrent state
   (`base_tokens`).
2. It puts more tokens into the blocks of layers with smaller pages (`block_sizes`).
3. It divides the layers into groups of equally many layers (`group_counts`).

If blocks are the outermost axis of the memory layout, pages may differ in size. Steps 2 and 3 are then
replaced by packing: a group gets as many layers as fit into the bytes of a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvferry.errors import GeometryError
from kvferry.geometry import GroupKind
from kvferry.geometry.interior import page_interior
from kvferry.geometry.store import LayerCache

BLOCK_TOKENS = 16
"""vLLM's ordinary number of tokens per block."""
_HYBRID_LATENT_ALIGNMENT = 128
_INDEXED = {GroupKind.MLA: 64, GroupKind.FULL: 128}
"""Number of tokens per block in models with a sparse-attention indexer. Keys: the kind of the main cache,
which is MLA for DeepSeek V3.2 and FULL (K and V) for MiniMax-M3."""
_SIMILAR = 1.5


def base_tokens(stores: Iterable[LayerCache], tp: int, asked: int | None) -> tuple[int, str]:
    """Return the number of tokens per block that vLLM chooses for a model, and the reason for this number.

    For models with attention and recurrent state, vLLM (`Platform._align_hybrid_block_size`) takes the
    smallest multiple of 16 for which an attention page (one block in one layer) is at least as large as the
    recurrent state of a layer. If the model has MLA latents, vLLM takes multiples of 128. If the configured
    size is larger, vLLM takes multiples of the configured size. Attention pages and recurrent state shrink
    differently with tensor parallelism, so the block size depends on `tp`.

    Args:
        stores: KV cache of each layer.
        tp: number of tensor-parallel ranks.
        asked: configured number of tokens per block; None for vLLM's choice.

    Returns:
        The number of tokens per block, and the reason as a sentence. The reason is empty if the number is
        the configured number, vLLM's ordinary number, or fixed by the model.

    Raises:
        GeometryError: the heads cannot be distributed evenly over the ranks.
    """
    stores = dict.fromkeys(stores)
    if all(store.block_tokens for store in stores):
        return max(store.block_tokens for store in stores), ""
    state = [page_bytes(s, tp, 1) for s in stores if s.kind is GroupKind.STATE]
    tokens = [page_bytes(s, tp, 1) for s in stores if s.kind is not GroupKind.STATE]
    if not state or not tokens:
        return _of_kernels(stores, asked)
    latent = any(store.kind is GroupKind.MLA for store in stores)
    step = max(asked or BLOCK_TOKENS, _HYBRID_LATENT_ALIGNMENT if latent else BLOCK_TOKENS)
    found = step * -(-max(state) // (step * max(tokens)))
    found = BLOCK_TOKENS * -(-found // BLOCK_TOKENS)
    if found == asked:
        return found, ""
    return found, (
        f"blocks of {found:,} tokens at TP{tp}: vLLM makes a page of attention "
        f"({max(tokens):,} bytes per token) hold a snapshot of state ({max(state):,} bytes)"
    )


def _of_kernels(stores: Iterable[LayerCache], asked: int | None) -> tuple[int, str]:
    """Return the tokens per block of a model that does not combine attention with recurrent state.

    If no size is configured, this is the block size that vLLM's attention kernels need.

    Args:
        stores: KV cache of each layer.
        asked: configured number of tokens per block; None for vLLM's choice.

    Returns:
        The number of tokens per block, and the reason as a sentence. The reason is empty if the number is
        the configured number or vLLM's ordinary number.
    """
    if asked is not None:
        return asked, ""
    stores = list(stores)
    if not any(field.name == "indexer" for store in stores for field in store.fields):
        return BLOCK_TOKENS, ""
    main = next(store.kind for store in stores if store.fields[0].name != "indexer")
    found = _INDEXED.get(main, BLOCK_TOKENS)
    return found, f"blocks of {found} tokens: vLLM's kernels for sparse attention take no smaller ones"


def block_sizes(
    stores: Iterable[LayerCache], tp: int, layout: str, tokens: int
) -> tuple[dict[LayerCache, int], str]:
    """Return the number of tokens per block for each kind of layer.

    A page holds one block in one layer. If the largest page is a multiple of a smaller page, vLLM
    (`unify_kv_cache_spec_page_size`) puts that many times more tokens into the smaller page's block.
    Otherwise vLLM pads the smaller page.

    Args:
        stores: KV cache of each layer. Layers with equal caches are of the same kind.
        tp: number of tensor-parallel ranks.
        layout: name of the memory layout, such as ``LBNHC``: the axes from the outermost to the innermost.
        tokens: number of tokens per block, from `base_tokens`.

    Returns:
        The number of tokens per block for each kind of layer, and the reason as a sentence why some blocks
        have more than `tokens` tokens. The reason is empty if no block has more.

    Raises:
        GeometryError: the layout does not suit this model.
    """
    kinds = list(dict.fromkeys(stores))
    sizes = {store: store.block_tokens or tokens for store in kinds}
    if layout[0] == "B" or _one_table(kinds):
        return sizes, ""
    if any(store.block_tokens for store in kinds):
        raise GeometryError(
            f"{layout} has layers outside of blocks, but this model's layers have blocks of different sizes; "
            "use BLHNC"
        )
    pages = {s: page_bytes(s, tp, size) for s, size in sizes.items() if s.kind is not GroupKind.STATE}
    largest = max(pages.values(), default=0)
    grown = {s: sizes[s] * (largest // page) for s, page in pages.items() if largest % page == 0}
    sizes |= grown
    more = sorted({size for size in grown.values() if size > tokens})
    if not more:
        return sizes, ""
    return sizes, (
        f"blocks of {' or '.join(map(str, more))} tokens at TP{tp} in layers that keep less per token: vLLM "
        "makes all pages equally large"
    )


def group_counts(
    layers: Iterable[LayerCache], tp: int, layout: str, sizes: Mapping[LayerCache, int]
) -> dict[LayerCache, int]:
    """Return the number of KV cache groups over which vLLM distributes the layers of each kind.

    If all layers need the same tokens of a prompt, vLLM uses one block table for all layers, and every kind
    is one group. Otherwise each group has as many layers as the rarest kind. But if the most frequent kind
    has less than 1.5 times as many layers as the rarest kind, each group has as many layers as the most
    frequent kind (`_get_kv_cache_groups_uniform_page_size`). If blocks are the outermost axis of the layout
    and pages differ in size, the rule in `_packed` applies (vLLM's `_get_packed_kv_cache_groups`).

    Args:
        layers: KV cache of each layer. Layers with equal caches are of the same kind.
        tp: number of tensor-parallel ranks.
        layout: name of the memory layout, such as ``LBNHC``: the axes from the outermost to the innermost.
        sizes: number of tokens per block for each kind of layer, from `block_sizes`.
    """
    alike = Counter(layers)
    if _one_table(alike):
        return dict.fromkeys(alike, 1)
    pages = {store: page_bytes(store, tp, sizes[store]) for store in alike}
    if layout[0] == "B" and _differ(pages):
        return _packed(alike, pages, sizes)
    least, most = min(alike.values()), max(alike.values())
    size = most if most < _SIMILAR * least else least
    return {store: -(-count // size) for store, count in alike.items()}


def _packed(
    alike: Mapping[LayerCache, int], pages: Mapping[LayerCache, int], sizes: Mapping[LayerCache, int]
) -> dict[LayerCache, int]:
    """Return the number of KV cache groups for each kind of layer in a layout whose outermost axis is blocks.

    This is vLLM's rule for models whose pages (one block in one layer) differ in size. A *bucket* contains
    all layers that need the same tokens and have the same block size. If some bucket contains several kinds
    of layers in equal numbers, every such bucket is one group. The layers of a bucket with a single kind are
    then distributed over groups of about as many layers. If no bucket contains several kinds in equal
    numbers, only sliding-window layers are distributed. A group then gets as many of them as fit into the
    bytes of a block, which the other layers determine.

    Args:
        alike: number of layers of each kind.
        pages: bytes of a page, for each kind of layer.
        sizes: number of tokens per block, for each kind of layer.
    """
    buckets: dict[object, list[LayerCache]] = {}
    for store in alike:
        buckets.setdefault((*_needs(store), sizes[store]), []).append(store)
    even = {need: alike[of[0]] for need, of in buckets.items() if len({alike[store] for store in of}) == 1}
    pairs = [count for need, count in even.items() if len(buckets[need]) > 1]
    if pairs:
        repeats = _least_padding(list(even.values()), max(pairs))
        return {
            store: -(-even[need] // repeats) if need in even else 1
            for need, of in buckets.items()
            for store in of
        }
    block = max(
        sum(pages[store] * (1 if store.kind is GroupKind.SLIDING else alike[store]) for store in of)
        for of in buckets.values()
    )
    return {
        store: -(-count // max(block // pages[store], 1)) if store.kind is GroupKind.SLIDING else 1
        for store, count in alike.items()
    }


def _least_padding(counts: Sequence[int], least: int) -> int:
    """Choose the number of layers per KV cache group that leaves the fewest places in the groups empty.

    The layers of each bucket (set of layers) fill groups of equal size, and the last group of a bucket may
    remain partly empty. If several numbers leave equally few empty places, the largest number is returned.

    Args:
        counts: number of layers in each bucket.
        least: minimum number of layers per group.
    """
    return min(
        range(least, max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size)
    )


def _differ(pages: Mapping[LayerCache, int]) -> bool:
    """Return True if attention pages differ in size. Recurrent state is ignored, because vLLM pads it.

    Args:
        pages: bytes of a page (one block in one layer), for each kind of layer.
    """
    return len({page for store, page in pages.items() if store.kind is not GroupKind.STATE}) > 1


def _one_table(stores: Iterable[LayerCache]) -> bool:
    """Return True if all layers can share a block table: they need the same tokens and the same block size.

    Args:
        stores: KV cache of each layer.
    """
    return len({(*_needs(store), store.block_tokens) for store in stores}) == 1


def _needs(store: LayerCache) -> tuple[GroupKind, int]:
    """Return the properties of a layer that decide which tokens of a prompt the layer needs.

    Returns:
        The kind of the layer's cache, with MLA as full attention, and the attention span in tokens.
    """
    return GroupKind.FULL if store.kind is GroupKind.MLA else store.kind, store.attention_span


def page_bytes(store: LayerCache, tp: int, tokens: int) -> int:
    """Return the bytes of a page (one block in one layer) on one rank.

    Args:
        store: KV cache of the layer, over all ranks.
        tp: number of tensor-parallel ranks.
        tokens: number of tokens per block; ignored for recurrent state, whose page has one state.
    """
    return page_interior(store, tokens, 1, 0, tp).page_bytes
