"""Block sizes, KV cache groups and positions of snapshots, as vLLM 0.32 derives them on a CUDA machine.

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
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvferry.common.errors import ConfigError, GeometryError
from kvferry.common.units import parse_count
from kvferry.geometry import GroupKind
from kvferry.tools.models.interior import page_interior
from kvferry.tools.models.store import LayerCache

# vLLM's ordinary number of tokens per block.
BLOCK_TOKENS = 16
_HYBRID_LATENT_ALIGNMENT = 128
# Number of tokens per block in models with a sparse-attention indexer. Keys: the kind of the main cache,
# which is MLA for DeepSeek V3.2 and FULL (K and V) for MiniMax-M3.
_INDEXED = {GroupKind.MLA: 64, GroupKind.FULL: 128}
_SIMILAR = 1.5

# Default of ``max_num_batched_tokens`` of an API server on a GPU with at least 70 GiB of memory. vLLM takes
# 16,384 from 160 GiB on, and 2,048 on smaller GPUs and on an A100 (`EngineArgs.get_batch_defaults`).
STEP_TOKENS = 8192

# Default of ``prefix_cache_retention_interval``: only the last snapshot is retained.
LAST_ONLY = 0


def base_tokens(caches: Iterable[LayerCache], tp: int, configured: int | None) -> tuple[int, str]:
    """Return the number of tokens per block that vLLM chooses for a model, and the reason as a sentence.

    The reason is empty if the number was configured, is vLLM's usual number (16), or is fixed by the model.
    """
    caches = dict.fromkeys(caches)
    if all(cache.block_tokens for cache in caches):
        return max(cache.block_tokens for cache in caches), ""
    state = [page_bytes(s, tp, 1) for s in caches if s.kind is GroupKind.STATE]
    tokens = [page_bytes(s, tp, 1) for s in caches if s.kind is not GroupKind.STATE]
    if not state or not tokens:
        if configured is not None:
            return configured, ""
        if not any(field.name == "indexer" for cache in caches for field in cache.fields):
            return BLOCK_TOKENS, ""
        main = next(cache.kind for cache in caches if cache.fields[0].name != "indexer")
        found = _INDEXED.get(main, BLOCK_TOKENS)
        return found, (
            f"blocks of {found} tokens: vLLM's kernels for sparse attention need at least this size"
        )
    # `Platform._align_hybrid_block_size` enlarges the block in steps until the largest attention page holds
    # the state of any layer. Both depend on `tp`, by different factors.
    latent = any(cache.kind is GroupKind.MLA for cache in caches)
    step = max(configured or BLOCK_TOKENS, _HYBRID_LATENT_ALIGNMENT if latent else BLOCK_TOKENS)
    found = step * -(-max(state) // (step * max(tokens)))
    found = BLOCK_TOKENS * -(-found // BLOCK_TOKENS)
    if found == configured:
        return found, ""
    return found, (
        f"blocks of {found:,} tokens at TP{tp}: vLLM makes a page of attention "
        f"({max(tokens):,} bytes per token) hold a snapshot of state ({max(state):,} bytes)"
    )


def block_sizes(
    caches: Iterable[LayerCache], tp: int, layout: str, tokens: int
) -> tuple[dict[LayerCache, int], str]:
    """Return the number of tokens per block for each kind of layer, and why some have more than `tokens`.

    The reason is a sentence, empty if no block has more.

    Raises:
        GeometryError: blocks are not the outermost axis of the layout, but the model fixes the block size of
            some layers, and its layers cannot share a block table.
    """
    kinds = list(dict.fromkeys(caches))
    sizes = {cache: cache.block_tokens or tokens for cache in kinds}
    if layout[0] == "B" or _share_block_table(kinds):
        return sizes, ""
    if any(cache.block_tokens for cache in kinds):
        raise GeometryError(
            f"{layout} has layers outside of blocks, but this model's layers have blocks of different sizes; "
            "use BLHNC"
        )
    # `unify_kv_cache_spec_page_size` makes all pages equal in size. A smaller page gets several times as many
    # tokens if that makes it as large, and is padded otherwise.
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
    """Return the number of KV cache groups over which vLLM distributes the layers of each kind."""
    layer_counts = Counter(layers)
    if _share_block_table(layer_counts):
        return dict.fromkeys(layer_counts, 1)
    pages = {cache: page_bytes(cache, tp, sizes[cache]) for cache in layer_counts}
    # vLLM pads recurrent state to the size of other pages.
    unequal = len({page for cache, page in pages.items() if cache.kind is not GroupKind.STATE}) > 1
    if layout[0] == "B" and unequal:
        return _packed_group_counts(layer_counts, pages, sizes)
    # Otherwise every group has room for the same number of layers (`_get_kv_cache_groups_uniform_page_size`).
    least, most = min(layer_counts.values()), max(layer_counts.values())
    size = most if most < _SIMILAR * least else least
    return {cache: -(-count // size) for cache, count in layer_counts.items()}


def _packed_group_counts(
    layer_counts: Mapping[LayerCache, int], pages: Mapping[LayerCache, int], sizes: Mapping[LayerCache, int]
) -> dict[LayerCache, int]:
    """Return the number of KV cache groups for each kind of layer if pages differ in size.

    This is the rule of vLLM's `_get_packed_kv_cache_groups`, for layouts whose outermost axis is blocks. A
    *bucket* contains all layers that need the same tokens and have the same block size. A *mixed* bucket
    contains several kinds of layers in equal numbers.
    """
    buckets: dict[object, list[LayerCache]] = {}
    for cache in layer_counts:
        buckets.setdefault((*_attention_pattern(cache), sizes[cache]), []).append(cache)
    even = {
        need: layer_counts[of[0]]
        for need, of in buckets.items()
        if len({layer_counts[cache] for cache in of}) == 1
    }
    pairs = [count for need, count in even.items() if len(buckets[need]) > 1]
    # Each mixed bucket is one group. Buckets of a single kind are divided into groups of equal size, at least
    # as many layers as any one kind has in a mixed bucket.
    if pairs:
        # The size of a group that leaves the fewest places in groups empty. Of several, the largest.
        repeats = min(
            range(max(pairs), max(even.values()) + 1),
            key=lambda size: (sum(-count % size for count in even.values()), -size),
        )
        return {
            cache: -(-even[need] // repeats) if need in even else 1
            for need, of in buckets.items()
            for cache in of
        }
    # Without mixed buckets, only sliding-window layers are divided: each group gets as many as fit into a
    # block, which has the size of the largest bucket. There each sliding-window kind counts as one page.
    block = max(
        sum(pages[cache] * (1 if cache.kind is GroupKind.SLIDING else layer_counts[cache]) for cache in of)
        for of in buckets.values()
    )
    return {
        cache: -(-count // max(block // pages[cache], 1)) if cache.kind is GroupKind.SLIDING else 1
        for cache, count in layer_counts.items()
    }


def _share_block_table(caches: Iterable[LayerCache]) -> bool:
    return len({(*_attention_pattern(cache), cache.block_tokens) for cache in caches}) == 1


def _attention_pattern(cache: LayerCache) -> tuple[GroupKind, int]:
    """Return what decides which tokens of a prompt a layer needs. MLA counts as full attention."""
    return GroupKind.FULL if cache.kind is GroupKind.MLA else cache.kind, cache.attention_span


def page_bytes(cache: LayerCache, tp: int, tokens: int) -> int:
    """Return the bytes of a page on one rank. `tokens` is ignored for recurrent state."""
    return page_interior(cache, tokens, 1, 0, tp).page_bytes


@dataclass(frozen=True, slots=True)
class SnapshotSteps:
    """The settings of an engine that decide at which positions it takes snapshots.

    In the example, an engine with blocks of 128 tokens computes a prompt of 2,000 tokens under three
    settings. The first computes it in one step. The second has steps of 512 tokens: 600, rounded down to
    whole blocks. The third has the same steps, and retains snapshots every 1,024 tokens and at the end.

    >>> settings = ((2048, 0), (600, None), (600, 1024))
    >>> [list(SnapshotSteps(128, step, retention).positions(2000)) for step, retention in settings]
    [[1920], [512, 1024, 1536, 1920], [1024, 1920]]

    Attributes:
        block_tokens: number of tokens per block, one size for all groups of a model with recurrent state.
    """

    block_tokens: int
    step_tokens: int = STEP_TOKENS
    retention: int | None = LAST_ONLY

    def __post_init__(self) -> None:
        if self.step_tokens < 1:
            raise ConfigError(f"--step-tokens is {self.step_tokens}; a step has at least 1")
        if self.retention is not None and self.retention % self.block_tokens:
            raise ConfigError(
                f"--retention is {self.retention}; vLLM takes 0, None or multiples of a block, which has "
                f"{self.block_tokens} tokens"
            )

    @property
    def aligned_step_tokens(self) -> int:
        """Whole blocks, at least one."""
        return max(self.step_tokens // self.block_tokens, 1) * self.block_tokens

    def positions(
        self, prompt: int, start: int = 0, shared: int = 0, placed: Collection[int] = ()
    ) -> Iterator[int]:
        """Yield, in ascending order, the positions in a prompt at which vLLM takes and retains a snapshot.

        Args:
            shared: position at the end of a block up to which the engine has the attention blocks of another
                prompt but no snapshot; 0 if there is none. vLLM ends a step there and retains the snapshot.
            placed: ends of blocks at which kvferry has vLLM do the same (`planning.retention`).
        """
        last = self.last_boundary(prompt)
        for end in self.step_ends(prompt, start, shared, placed):
            if end == prompt:
                if prompt % self.block_tokens == 0 and self.retains(prompt):
                    yield prompt
            elif end % self.block_tokens == 0 and (end in (last, shared, *placed) or self.retains(end)):
                yield end

    def last_boundary(self, prompt: int) -> int:
        """Return the position of the last end of a block that leaves a token of the prompt to compute."""
        return (prompt - 1) // self.block_tokens * self.block_tokens

    def step_ends(
        self, prompt: int, start: int = 0, shared: int = 0, placed: Collection[int] = ()
    ) -> Iterator[int]:
        """Yield the positions at which the prefill steps of a prompt end; the last one is its length."""
        last = self.last_boundary(prompt)
        while start < prompt:
            end = start - start % self.block_tokens + self.aligned_step_tokens
            if start % self.block_tokens:
                end = start - start % self.block_tokens + self.block_tokens
            start = min([end, prompt, *(stop for stop in (last, shared, *placed) if start < stop)])
            yield start

    def retains(self, tokens: int) -> bool:
        """Return whether the prefix cache retains a snapshot for its position alone, inside any prompt."""
        return self.retention is None or (self.retention > 0 and tokens % self.retention == 0)


def parse_retention(text: str) -> int | None:
    """Parse the value of vLLM's option ``--prefix-cache-retention-interval``; None to retain all snapshots.

    >>> parse_retention("0"), parse_retention("8448"), parse_retention("None")
    (0, 8448, None)
    """
    if text.lower() in ("none", ""):
        return None
    try:
        return parse_count(text)
    except ValueError as error:
        raise ConfigError(
            f"--retention is {text!r}; give a number of tokens, 0 for the last only, or None"
        ) from error
