"""Hypothesis strategies: two engines of one model, and a request between them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from hypothesis import strategies as st

from kvferry.geometry import GroupKind
from kvferry.planning.select import LoadSpan
from support.engines import LAYOUTS, SCATTERED, EngineSpec, Family, GroupSpec, Interior, Stored, shard
from support.oracle import cells_of, visible

SMALL = st.tuples(st.integers(1, 6), st.integers(1, 3))
"""Tokens of a kernel block, and kernel blocks of a block."""
UNLIKE = st.sampled_from(
    [(784, 1), (16, 49), (400, 1), (16, 25), (32, 33), (1056, 1), (16, 131), (131, 16), (48, 11), (97, 1)]
)
"""The same, as hybrids have them: of most pairs the least common multiple is many times the sum."""
HEADS = (1, 2, 3, 4, 6)
PARALLEL = (1, 2, 3, 4)


@dataclass(frozen=True)
class Transfer:
    """A request and the engines it goes between.

    Spans are by group of the destination, tables by group of their own side.
    """

    families: tuple[Family, ...]
    src: EngineSpec
    dst: EngineSpec
    spans: tuple[LoadSpan, ...]
    src_tables: tuple[np.ndarray, ...]
    dst_tables: tuple[np.ndarray, ...]


@st.composite
def attention_fields(draw: st.DrawFn) -> tuple[Stored, ...]:
    """K and V of different widths, some quantised with scales per token; or a replicated latent."""
    width = st.integers(1, 3)
    item = draw(st.sampled_from((1, 2, 4)))
    if draw(st.integers(0, 3)) == 0:
        fields = [Stored("latent", item, 0, (("content", draw(width)),))]
        if draw(st.booleans()):
            fields.append(Stored("indexer", 1, 0, (("content", draw(width)),)))
        return tuple(fields)
    heads = draw(st.sampled_from(HEADS))
    fields = [Stored(name, item, heads, (("content", draw(width)),)) for name in ("k", "v")]
    if item == 1:
        scales = draw(st.sampled_from(((("scale", 4),), (("k.scale", 4), ("v.scale", 4)), (("k.scale", 1),))))
        fields += [Stored(name, size, heads, (("content", draw(width)),)) for name, size in scales]
    return tuple(fields)


@st.composite
def state_fields(draw: st.DrawFn) -> tuple[Stored, ...]:
    """Recurrent state and a convolution whose segments shard separately, or not at all."""
    inner = (("row", draw(st.integers(1, 2))), ("column", draw(st.integers(1, 3))))
    width = draw(st.integers(1, 3))
    ssm = Stored("ssm", draw(st.sampled_from((2, 4))), draw(st.sampled_from(HEADS)), inner)
    segments = [
        Stored(f"conv.{name}", 2, draw(st.sampled_from((0, *HEADS))), (("width", width),)) for name in "xbc"
    ]
    return tuple(draw(st.permutations([ssm, *segments])))


@st.composite
def token_kinds(draw: st.DrawFn, fields: tuple[Stored, ...]) -> Family:
    kind = draw(st.sampled_from((GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED)))
    if fields and fields[0].name == "latent":
        kind = GroupKind.MLA
    attention_span = draw(st.integers(1, 24)) if kind in (GroupKind.SLIDING, GroupKind.CHUNKED) else 0
    return Family(kind, attention_span, fields)


@st.composite
def hybrid_families(draw: st.DrawFn) -> Family:
    what = draw(st.sampled_from(("tokens", "tokens", "tokens", "state", "opaque tokens", "opaque state")))
    if what == "tokens":
        return draw(token_kinds(draw(attention_fields())))
    if what == "state":
        return Family(GroupKind.STATE, fields=draw(state_fields()))
    size, sharded = draw(st.integers(1, 9)), draw(st.booleans())
    kind = GroupKind.STATE if what == "opaque state" else GroupKind.FULL
    return Family(kind, opaque_bytes=size, opaque_sharded=sharded)


@st.composite
def stages(draw: st.DrawFn, layers: int) -> tuple[int, ...]:
    """Layers per pipeline rank, as uneven as they come."""
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=2))) if layers > 1 else []
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))


@st.composite
def parallel(draw: st.DrawFn, families: tuple[Family, ...], like: int = 0) -> int:
    """A tensor-parallel size that the model's heads allow; `like` another where shards are opaque."""
    if like and any(family.opaque_sharded for family in families):
        return like
    heads = {field.heads for family in families for field in family.fields if field.heads}
    return draw(st.sampled_from([n for n in PARALLEL if all(h % n == 0 or n % h == 0 for h in heads)]))


@st.composite
def shared_tokens(
    draw: st.DrawFn, families: tuple[Family, ...], of_layer: tuple[int, ...], groups: tuple[GroupSpec, ...]
) -> tuple[GroupSpec, ...]:
    """Groups whose tokens ranks divide: some or all of those that hold tokens in fields."""
    ranks = draw(st.sampled_from(PARALLEL))
    found = []
    for group in groups:
        size = group.block_tokens
        divisible = not any(
            families[of_layer[n]].snapshot or families[of_layer[n]].opaque_bytes for n in group.layers
        )
        if ranks > 1 and divisible and draw(st.integers(0, 3)):
            interleave = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            group = replace(group, turns=(ranks, interleave))  # noqa: PLW2901
        found.append(group)
    return tuple(found)


@st.composite
def sharing(
    draw: st.DrawFn, families: tuple[Family, ...], groups: tuple[GroupSpec, ...], like: int = 0
) -> tuple[int, int]:
    """(tensor-parallel size, other ranks for each) with which all tokens of every head are on some rank."""
    heads = {field.heads for family in families for field in family.fields if field.heads} or {0}
    turns = {group.turns[0] for group in groups}

    def complete(tp: int, pcp: int) -> bool:
        spec = EngineSpec(tp, (), groups, "", Interior(), 0, pcp=pcp)
        for total, ranks in product(heads, turns):
            have = set()
            for index in range(tp * pcp):
                tp_rank, turn = spec.place(index)
                have.add((shard(total, tp_rank, tp)[0] if total else 0, turn % ranks))
            if len(have) < len({start for start, _ in have}) * ranks:
                return False
        return True

    tp_sizes = [like] if like and any(family.opaque_sharded for family in families) else PARALLEL
    possible = [
        (tp, pcp)
        for tp in tp_sizes
        for pcp in PARALLEL
        if all(h == 0 or h % tp == 0 or tp % h == 0 for h in heads) and complete(tp, pcp)
    ]
    return draw(st.sampled_from(possible))


@st.composite
def interiors(draw: st.DrawFn) -> Interior:
    names = ("k", "v", "latent", "ssm", "conv.x")
    transposed = draw(st.frozensets(st.sampled_from(names)))
    return Interior(draw(st.booleans()), transposed, draw(st.integers(0, 3)))


@st.composite
def groupings(
    draw: st.DrawFn,
    families: tuple[Family, ...],
    of_layer: tuple[int, ...],
    opaque_tokens: int,
    sizes: st.SearchStrategy[tuple[int, int]],
) -> tuple[GroupSpec, ...]:
    """Layers to groups: one per family, or all token families in one (an engine that does not know hybrids).

    `opaque_tokens`: block size of groups with opaque pages. `sizes`: of other blocks.
    """
    alike = len(set(families)) == 1 or len({family.fields for family in families}) == 1
    merged = draw(st.booleans())
    one_size = draw(sizes)
    joined = tuple(n for n, f in enumerate(of_layer) if not families[f].snapshot)
    groups = []
    for number, family in enumerate(families):
        layers = tuple(n for n, f in enumerate(of_layer) if f == number)
        if merged and not family.snapshot and joined:
            layers, joined = joined, ()
            family = Family(GroupKind.FULL)  # noqa: PLW2901
        elif merged and not family.snapshot:
            continue
        size = one_size if alike or draw(st.booleans()) else draw(sizes)
        if any(families[of_layer[n]].opaque_bytes for n in layers):
            size = (opaque_tokens, 1)
        groups.append(GroupSpec(family.kind, family.attention_span, layers, *size))
    return tuple(draw(st.permutations(groups)))


@st.composite
def transfers(
    draw: st.DrawFn,
    sizes: st.SearchStrategy[tuple[int, int]] = SMALL,
    tokens: int = 40,
    layers: int = 5,
    *,
    shared: bool = False,
) -> Transfer:
    """Any transfer between any two engines of any model that this page can describe.

    `sizes`: of blocks that need not be alike. `tokens`, `layers`: at most. `shared`: ranks of either engine
    may divide the tokens of a block.
    """
    one_shape = draw(st.booleans())
    if one_shape:
        fields = draw(attention_fields())
        families = tuple(draw(st.lists(token_kinds(fields), min_size=1, max_size=3)))
    else:
        families = tuple(draw(st.lists(hybrid_families(), min_size=1, max_size=3)))
    of_layer = tuple(draw(st.lists(st.integers(0, len(families) - 1), min_size=1, max_size=layers)))
    prompt = draw(st.integers(1, tokens))
    total = draw(st.sampled_from((prompt, prompt, max(prompt - 1, 0), draw(st.integers(0, prompt)))))

    layouts = LAYOUTS if one_shape else [name for name in LAYOUTS if name not in SCATTERED]
    opaque_tokens = draw(st.integers(1, 6))
    src_groups = draw(groupings(families, of_layer, opaque_tokens, sizes))
    dst_groups = draw(groupings(families, of_layer, opaque_tokens, sizes))
    if shared:
        src_groups = draw(shared_tokens(families, of_layer, src_groups))
        dst_groups = draw(shared_tokens(families, of_layer, dst_groups))
    cached = st.one_of(st.just(0), st.integers(0, 40))
    spans = tuple(_span(draw(cached), group, total, prompt) for group in dst_groups)

    shuffle = random.Random(draw(st.integers(0, 2**16)))
    scattered = draw(st.booleans())
    src_needs = _cells_per_group(src_groups, dst_groups, spans)
    dst_needs = _cells_per_group(dst_groups, dst_groups, spans)
    spare = draw(st.integers(0, 3))
    sides = []
    for groups, needs, last in ((src_groups, src_needs, total), (dst_groups, dst_needs, prompt)):
        tables, blocks = _tables(groups, needs, last, spare, shuffle if scattered else None)
        if draw(st.booleans()):
            tables = tuple(
                _forget(table, group, need) for table, group, need in zip(tables, groups, needs, strict=True)
            )
        sides.append((tables, blocks))
    (src_tables, src_blocks), (dst_tables, dst_blocks) = sides

    kept, layout = len(of_layer), st.sampled_from(layouts)
    tp, pcp = draw(sharing(families, src_groups)) if shared else (draw(parallel(families)), 1)
    src = EngineSpec(tp, draw(stages(kept)), src_groups, draw(layout), draw(interiors()), src_blocks, pcp=pcp)
    tp, pcp = draw(sharing(families, dst_groups, tp)) if shared else (draw(parallel(families, tp)), 1)
    dst = EngineSpec(
        tp, draw(stages(kept)), dst_groups, draw(layout), draw(interiors()), dst_blocks, 1 << 44, pcp
    )
    return Transfer(tuple(families[f] for f in of_layer), src, dst, spans, src_tables, dst_tables)


def _span(blocks: int, group: GroupSpec, total: int, prompt: int) -> LoadSpan:
    """The destination has some whole blocks already, or everything."""
    return LoadSpan(min(blocks * group.block_tokens, total), total, prompt)


def _cells_per_group(
    groups: tuple[GroupSpec, ...], dst_groups: tuple[GroupSpec, ...], spans: tuple[LoadSpan, ...]
) -> list[set[int]]:
    """Tokens that each of `groups` must have blocks for."""
    return [
        {
            token
            for dst, span in zip(dst_groups, spans, strict=True)
            if set(dst.layers) & set(group.layers)
            for token in cells_of(
                visible(dst.kind, dst.attention_span, span), group.block_tokens, dst.block_tokens
            )
        }
        for group in groups
    ]


def _tables(
    groups: tuple[GroupSpec, ...],
    needs: list[set[int]],
    tokens: int,
    spare: int,
    shuffle: random.Random | None,
) -> tuple[tuple[np.ndarray, ...], int]:
    """Block tables that share one pool, no id twice; the null block is 0."""
    lengths = []
    for group, need in zip(groups, needs, strict=True):
        last = max([tokens, *(t + 1 for t in need)])
        lengths.append(1 if group.kind is GroupKind.STATE else -(-last // group.block_tokens))
    blocks = 1 + sum(lengths) + spare
    ids = list(range(1, blocks))
    if shuffle:
        shuffle.shuffle(ids)
    table = np.array(ids, np.int64)
    cuts = np.cumsum(lengths)
    return tuple(np.split(table[: cuts[-1]], cuts[:-1])), blocks


def _forget(table: np.ndarray, group: GroupSpec, need: set[int]) -> np.ndarray:
    """Null blocks wherever nothing is needed, as an engine leaves them behind a window."""
    if group.kind is GroupKind.STATE:
        return table
    kept = {t // group.block_tokens for t in need}
    return np.where(np.isin(np.arange(len(table)), sorted(kept)), table, 0)
