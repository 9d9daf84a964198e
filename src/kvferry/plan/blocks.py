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
    """Return the number of tokens per block, and the reason in words.

    The reason is empty if the size is the requested one, vLLM's ordinary one or the model's own.

    For models with recurrent state, vLLM (`Platform._align_hybrid_block_size`) takes the smallest multiple of
    16 for which an attention page is at least as large as a snapshot of state. If the model has MLA latents,
    vLLM takes multiples of 128. If the requested size is larger, vLLM takes multiples of the requested size.
    Pages and snapshots shrink differently with tensor parallelism, so the block size depends on `tp`.

    Args:
        stores: caches of the layers.
        tp: number of tensor-parallel ranks.
        asked: configured number of tokens per block; None for vLLM's choice.

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
    """Return the number of tokens per block in a model without a mix of attention and state, and the reason.

    Without a requested size, it is the size that vLLM's attention kernels need. The reason is empty for the
    requested size and for vLLM's ordinary size.

    Args:
        stores: caches of the layers.
        asked: requested number of tokens per block; None for vLLM's choice.
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
    """Return the number of tokens per block for each kind of layer, and the reason for larger blocks.

    If the largest page is a multiple of a smaller page, vLLM (`unify_kv_cache_spec_page_size`) multiplies the
    tokens of the smaller page's block by the quotient. Otherwise vLLM pads the smaller page. The reason is
    empty if no block is larger than `tokens`.

    Args:
        stores: caches of the layers.
        tp: number of tensor-parallel ranks.
        layout: order of the axes in memory.
        tokens: number of tokens per block, from `base_tokens`.

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
    """Return the number of groups over which the layers of each kind are distributed.

    If all layers need the same tokens of a prompt, vLLM uses one block table for all of them. Otherwise each
    group has as many layers as the rarest kind. But if the most frequent kind has less than 1.5 times as many
    layers as the rarest kind, each group has as many layers as the most frequent kind
    (`_get_kv_cache_groups_uniform_page_size`). If blocks are outermost and pages differ in size, the rule in
    `_packed` applies (vLLM's `_get_packed_kv_cache_groups`).

    Args:
        layers: cache of every layer.
        tp: number of tensor-parallel ranks.
        layout: order of the axes in memory.
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
    """Return the number of groups of each kind of layer, if blocks are outermost and pages differ in size.

    A *bucket* contains all layers that need the same tokens and have the same block size. If some bucket
    contains several kinds of layers in equal numbers, every such bucket is one group. The layers of a bucket
    with a single kind are then distributed over groups of about as many layers. Without a bucket of several
    kinds, only sliding-window layers are distributed, such that a group fits into the block that the other
    buckets need.

    Args:
        alike: number of layers of each kind.
        pages: bytes of a page of each kind of layer.
        sizes: number of tokens per block for each kind of layer.
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
    """Return the number of layers per group that needs the least padding; in a tie, the largest such number.

    Args:
        counts: number of layers of each bucket, which are distributed over groups of this size.
        least: minimum number of layers per group.
    """
    return min(
        range(least, max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size)
    )


def _differ(pages: Mapping[LayerCache, int]) -> bool:
    """Return True if pages differ in size. Snapshots of state do not count, because vLLM pads them."""
    return len({page for store, page in pages.items() if store.kind is not GroupKind.STATE}) > 1


def _one_table(stores: Iterable[LayerCache]) -> bool:
    """Return True if all layers can share a block table: they need the same tokens and block size."""
    return len({(*_needs(store), store.block_tokens) for store in stores}) == 1


def _needs(store: LayerCache) -> tuple[GroupKind, int]:
    """Return the kind and span that decide which tokens a layer needs. MLA counts as full attention."""
    return GroupKind.FULL if store.kind is GroupKind.MLA else store.kind, store.attention_span


def page_bytes(store: LayerCache, tp: int, tokens: int) -> int:
    """Return the bytes of a page of `tokens` tokens on one rank; for a state layer, of a snapshot.

    Args:
        store: cache of the layer, over all ranks.
        tp: number of tensor-parallel ranks.
        tokens: number of tokens per block; ignored for a snapshot.
    """
    return page_interior(store, tokens, 1, 0, tp).page_bytes
