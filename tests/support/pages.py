"""Small pages and ranks to write examples with."""

from __future__ import annotations

from kvferry.geometry import Axis, Field, Group, GroupKind, Layer, PageFormat, RankGeometry, Region

ADDRESS = 1 << 40


def kv_page(
    tokens: int = 16, heads: int = 2, start: int = 0, total: int = 0, width: int = 8, item: int = 2
) -> PageFormat:
    """[heads][tokens][width]: one field ``kv``, head-major."""
    run = width * item
    head = Axis("head", ((heads, tokens * run),), start, total or heads)
    token = Axis("token", ((tokens, run),))
    content = Axis("content", ((width, item),))
    return PageFormat("kv", tokens, heads * tokens * run, (Field("kv", item, 0, (head, token, content)),))


def state_page(heads: int = 2, start: int = 0, total: int = 0) -> PageFormat:
    """One field ``ssm`` of 4 bytes per head."""
    return PageFormat(
        "state", 0, 4 * heads, (Field("ssm", 4, 0, (Axis("head", ((heads, 4),), start, total or heads),)),)
    )


def rank_of(
    *pages: PageFormat,
    kind: GroupKind = GroupKind.FULL,
    attention_span: int = 0,
    blocks: int = 8,
    tp: tuple[int, int] = (0, 1),
    address: int = ADDRESS,
) -> RankGeometry:
    """A rank with one group and a layer per page, each layer's pages one after the other."""
    layers = []
    at = address
    for number, page in enumerate(pages):
        layers.append(Layer(f"layers.{number}", at, page.page_bytes, page))
        at += blocks * page.page_bytes
    tokens = pages[0].block_tokens or 16
    group = Group(kind, tokens, attention_span, tuple(layers))
    return RankGeometry(*tp, 0, 1, blocks, (group,), (Region(address, at - address),))


def cross_layer(rank: RankGeometry) -> RankGeometry:
    """The same rank with all layers of a block side by side (BLHNC)."""
    (group,) = rank.groups
    stride = sum(layer.block_stride for layer in group.layers)
    at = rank.regions[0].address
    layers = []
    for layer in group.layers:
        layers.append(Layer(layer.name, at, stride, layer.page))
        at += layer.page.page_bytes
    moved = Group(group.kind, group.block_tokens, group.attention_span, tuple(layers))
    return RankGeometry(
        rank.tp_rank, rank.tp_size, rank.pp_rank, rank.pp_size, rank.num_blocks, (moved,), rank.regions
    )
