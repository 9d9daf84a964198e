"""Tokens of a block and layers of a group, as vLLM 0.32 derives them for a CUDA machine.

A block id belongs to one group at a time, so every group must fit into the same memory. If layers keep
different things, vLLM brings their pages to one size, in this order:

1. It makes a page of attention hold a snapshot of recurrent state (`base_tokens`).
2. It puts more tokens into the blocks of layers with smaller pages (`block_sizes`).
3. It gives all groups equally many layers (`group_counts`).

If blocks are outermost, pages may differ in size, and packing replaces 2 and 3: a group gets as many layers
as fit into the bytes of a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvferry.errors import GeometryError
from kvferry.geometry import GroupKind
from kvferry.geometry.interior import page_interior
from kvferry.geometry.store import LayerCache

BLOCK_TOKENS = 16
_HYBRID_LATENT_ALIGNMENT = 128
_INDEXED = {GroupKind.MLA: 64, GroupKind.FULL: 128}
"""Tokens of a block with an indexer beside a latent (DeepSeek V3.2), beside K and V (MiniMax-M3)."""
_SIMILAR = 1.5


def base_tokens(stores: Iterable[LayerCache], tp: int, asked: int | None) -> tuple[int, str]:
    """Return the tokens of a block, and the reason in words.

    The reason is empty for the requested size and for vLLM's ordinary size.

    For models with recurrent state, vLLM (`Platform._align_hybrid_block_size`) takes the least multiple of
    16 whose attention page is at least as large as a page of state. For latents it takes a multiple of 128,
    and for a larger requested size a multiple of that. Both pages shrink with tensor parallelism, but not
    equally, so the block size depends on `tp`.

    Args:
        stores: the caches of the layers.
        tp: number of tensor-parallel ranks.
        asked: the engine's configured tokens of a block; None if it has no such setting.

    Raises:
        GeometryError: the ranks can neither share nor copy the heads evenly.
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
    """Return the requested block size, else the one of the attention kernels, and the reason."""
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
    """Return the tokens of a block for each kind of layer, and the reason for larger blocks in words.

    If a page divides the largest page, vLLM (`unify_kv_cache_spec_page_size`) multiplies the tokens of its
    block by the quotient. It pads other pages.

    Args:
        stores: the caches of the layers.
        tp: number of tensor-parallel ranks.
        layout: order of the axes in memory.
        tokens: tokens of a block, from `base_tokens`.

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
    """Return the number of groups that share the layers of each kind.

    If all layers need the same tokens, vLLM uses one block table for all of them. Otherwise a group has as
    many layers as the rarest kind, or as the commonest kind if that has less than 1.5 times as many
    (`_get_kv_cache_groups_uniform_page_size`). If blocks are outermost and pages differ, vLLM deals out the
    sliding-window layers so that a group fits into the block that the other layers need
    (`_get_packed_kv_cache_groups`).

    Args:
        layers: the cache of every layer.
        tp: number of tensor-parallel ranks.
        layout: order of the axes in memory.
        sizes: tokens of a block by kind of layer, from `block_sizes`.
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
    """Return the number of groups by kind of layer, for outermost blocks and pages that differ.

    A *bucket* is all layers that need the same tokens. Buckets whose layers come in pairs of different pages
    stay whole, and the others are dealt out to groups of about as many layers. Without such a bucket only
    sliding-window layers are dealt out, to groups that fit into the block that the other buckets need.
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
    """Return the group size of at least `least` with the least padding; the largest one in a tie."""
    return min(
        range(least, max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size)
    )


def _differ(pages: Mapping[LayerCache, int]) -> bool:
    """Return whether pages stay different in size. Snapshots do not count: vLLM pads them."""
    return len({page for store, page in pages.items() if store.kind is not GroupKind.STATE}) > 1


def _one_table(stores: Iterable[LayerCache]) -> bool:
    """Return whether all layers need the same tokens, and so can share a block table."""
    return len({(*_needs(store), store.block_tokens) for store in stores}) == 1


def _needs(store: LayerCache) -> tuple[GroupKind, int]:
    """Return the kind and span that decide which tokens a layer needs. Latents count as full attention."""
    return GroupKind.FULL if store.kind is GroupKind.MLA else store.kind, store.attention_span


def page_bytes(store: LayerCache, tp: int, tokens: int) -> int:
    """Return the bytes of a snapshot, or of a page of `tokens` tokens, on one rank."""
    return page_interior(store, tokens, 1, 0, tp).page_bytes
