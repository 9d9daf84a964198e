"""The memory layout of every rank, from the cache of a model and the settings of an engine.

This is what an engine would allocate, computed without it. All groups of a rank share the same memory,
because a block id belongs to one group at a time. This memory is divided into *slots*: layer ``j`` of every
group lies in slot ``j``, which has the size of the largest page.

    B outermost    block 0 [slot 0 | slot 1 | ...]  block 1 [slot 0 | slot 1 | ...]  ...
    L outermost    slot 0 [block 0 | block 1 | ...]  slot 1 [block 0 | block 1 | ...]  ...

If B is outermost and the model has no recurrent state, there are no slots: the pages of a group lie side by
side, and a block is as large as the largest group needs. vLLM does the same: in such a pool, it pads only
snapshots of recurrent state. The layouts LHBNC and BHLNC require that all pages have the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from kvferry.common.errors import GeometryError
from kvferry.geometry import (
    LAYOUTS,
    Group,
    GroupKind,
    Interleave,
    Layer,
    PageFormat,
    PageMap,
    PoolRoom,
    RankGeometry,
    Region,
    is_compact,
    page_map,
)
from kvferry.tools.models.interior import PageInterior, page_interior, round_up
from kvferry.tools.models.store import LayerCache, ModelCache


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A KV cache group: indices in `ModelCache.layers` of the layers that share a block table.

    `block_tokens` are those of all ranks that divide a block (`EngineShape.dcp`).
    """

    layers: tuple[int, ...]
    block_tokens: int


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The settings of an engine that decide the memory layout of a model's cache."""

    tp: int
    stages: tuple[int, ...]  # number of entries of `ModelCache.layers` on each pipeline rank
    block_tokens: int  # tokens per block of layers for which neither the model nor `groups` gives it
    layout: str
    num_blocks: int  # of each rank's pool, the null block included
    kernel_tokens: int = 0  # tokens per kernel block if a block consists of several, otherwise 0
    # All layers of a group have the same `LayerCache`. If empty, layers with equal caches form one.
    groups: tuple[GroupShape, ...] = ()
    # Decode context parallelism: as many neighbouring tensor-parallel ranks divide the tokens of a block, of
    # which each takes `turn_tokens` in turn. A block then has as many tokens as `dcp` pages.
    dcp: int = 1
    turn_tokens: int = 1

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise GeometryError(f"layout is {self.layout!r}; it must be one of {', '.join(LAYOUTS)}")
        if self.tp < 1 or not self.stages or min(self.stages) < 1:
            raise GeometryError(
                f"{self.tp} tensor-parallel ranks, layers {self.stages} per pipeline rank; expected 1 or "
                "more of each"
            )
        if self.dcp < 1 or self.tp % self.dcp:
            raise GeometryError(
                f"{self.dcp} of {self.tp} tensor-parallel ranks divide the tokens of a block; expected a "
                f"divisor of {self.tp}"
            )
        if self.block_tokens < 1 or self.num_blocks < 1:
            raise GeometryError(
                f"a pool of {self.num_blocks} blocks of {self.block_tokens} tokens; expected 1 or more "
                "of each"
            )
        if self.kernel_tokens < 0 or (self.kernel_tokens and self.block_tokens % self.kernel_tokens):
            raise GeometryError(
                f"blocks of {self.block_tokens} tokens; expected a multiple of kernel blocks of "
                f"{self.kernel_tokens}"
            )
        if self.kernels > 1 and self.layout[0] == "B":
            raise GeometryError(
                f"{self.layout} has other layers' pages between blocks, so a block cannot be made of "
                f"{self.kernels} kernel blocks; use a layout with L outermost"
            )

    @property
    def ranks(self) -> int:
        return self.tp * len(self.stages)

    def dividing(self, cache: LayerCache) -> int:
        """Return how many ranks divide the tokens of a block of this cache."""
        return 1 if cache.kind is GroupKind.STATE else self.dcp

    @property
    def kernels(self) -> int:
        return self.block_tokens // self.kernel_tokens if self.kernel_tokens else 1


def split_stages(layers: int, pp: int) -> tuple[int, ...]:
    """Return the number of layers, with or without a cache, on each pipeline rank, as vLLM distributes them.

    >>> split_stages(30, 4), split_stages(5, 2)
    ((7, 8, 8, 7), (3, 2))
    """
    if not 1 <= pp <= layers:
        raise GeometryError(
            f"{layers} layers on {pp} pipeline ranks; every rank needs a layer, so choose 1 to {layers} ranks"
        )
    stages = [layers // pp] * pp
    # As in vLLM, the ranks just before the last one get the layers that are left.
    for i in range(layers % pp):
        stages[-2 - i] += 1
    return tuple(stages)


def group_layers(
    model: ModelCache, counts: Mapping[LayerCache, int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the layer indices of each KV cache group. All layers of a group have the same `LayerCache`.

    `counts` is the number of groups for each `LayerCache`; None for one each.
    """
    alike: dict[LayerCache, list[int]] = {}
    for number, store in enumerate(model.layers):
        alike.setdefault(store, []).append(number)
    groups = []
    for store, numbers in alike.items():
        count = counts[store] if counts else 1
        # In turn, so that each group has layers on every pipeline rank.
        groups += [tuple(numbers[turn::count]) for turn in range(count)]
    return tuple(groups)


def layer_name(number: int) -> str:
    """Return the name of a layer by its index in `ModelCache.layers`, whatever the settings of an engine."""
    return f"layers.{number}"


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The KV cache memory of one rank: fields to plan transfers, and a map of each group for raw pointers."""

    geometry: RankGeometry
    maps: tuple[PageMap, ...]


def lay_out(
    model: ModelCache, engine: EngineShape, addresses: Sequence[int] | None = None
) -> tuple[RankGeometry, ...]:
    """Return the geometry of every rank of an engine, ordered by pipeline rank and then tensor-parallel rank.

    Example: two layers of 4 heads, with K and V of 8 elements of 2 bytes. Each of two ranks has pages of 2
    heads of 16 tokens of 32 bytes:

    >>> from kvferry.geometry import GroupKind
    >>> from kvferry.tools.models.store import StoredField
    >>> fields = tuple(StoredField(name, 2, 4, (("content", 8),)) for name in ("k", "v"))
    >>> model = ModelCache("tiny", (LayerCache(GroupKind.FULL, 0, fields),) * 2)
    >>> first, second = lay_out(model, EngineShape(2, (2,), 16, "LBHNC", 10), (0, 1 << 20))
    >>> [(layer.address, layer.block_stride) for layer in first.groups[0].layers]
    [(0, 1024), (10240, 1024)]
    >>> [(field.name, field.held, field.offset) for field in second.groups[0].layers[0].page.fields]
    [('k', (('head', 2, 4),), 0), ('v', (('head', 2, 4),), 16)]

    Args:
        addresses: address of each rank's block pool; None for made-up addresses, if no memory is accessed.

    Raises:
        GeometryError: an engine with these settings cannot serve this model.
    """
    if addresses is None:
        # Far apart, so that the pools of no two ranks can overlap.
        addresses = [(1 << 40) + (rank << 38) for rank in range(engine.ranks)]
    if len(addresses) != engine.ranks:
        raise GeometryError(f"{len(addresses)} addresses for {engine.ranks} ranks; expected one for each")
    return tuple(
        lay_out_rank(model, engine, rank, address).geometry for rank, address in enumerate(addresses)
    )


def lay_out_rank(model: ModelCache, engine: EngineShape, rank: int, address: int) -> RankLayout:
    """Return the memory layout of one rank whose block pool, its only region, starts at `address`.

    `rank` is the pipeline rank times the tensor-parallel size, plus the tensor-parallel rank.
    """
    if sum(engine.stages) != len(model.layers):
        raise GeometryError(
            f"stages {engine.stages} hold {sum(engine.stages)} layers; expected {len(model.layers)}"
        )
    if model.query_heads % engine.tp:
        raise GeometryError(
            f"{model.query_heads} attention heads on {engine.tp} tensor-parallel ranks: every rank needs the "
            f"same number; choose a size that divides {model.query_heads}"
        )
    if not 0 <= rank < engine.ranks:
        raise GeometryError(f"rank {rank} does not exist; expected 0 to {engine.ranks - 1}")
    stage, tp_rank = divmod(rank, engine.tp)
    first = sum(engine.stages[:stage])
    on_stage = range(first, first + engine.stages[stage])
    placed = []
    shapes = engine.groups or [
        GroupShape(n, (store.block_tokens or engine.block_tokens) * engine.dividing(store))
        for n in group_layers(model)
        for store in (model.layers[n[0]],)
    ]
    for shape in shapes:
        store, kernels = model.layers[shape.layers[0]], 1
        tokens = shape.block_tokens // engine.dividing(store)
        if tokens == engine.block_tokens:
            tokens, kernels = engine.kernel_tokens or tokens, engine.kernels
        interior = page_interior(store, tokens, kernels, tp_rank, engine.tp)
        placed.append((shape, store, [n for n in shape.layers if n in on_stage], interior))
    pool = _Pool.of(engine, [(interior, len(numbers)) for _, _, numbers, interior in placed if numbers])
    maps, groups = [], []
    for shape, store, numbers, interior in placed:
        blocks = engine.num_blocks * interior.kernels
        counts = (len(numbers), blocks, interior.heads, interior.tokens, interior.content)
        where = page_map(engine.layout, address, counts, interior.kernels, pool.room(interior))
        page = _divided(interior.page(where), engine, store, tp_rank)
        layers = tuple(
            Layer(layer_name(n), where.page(j, 0), where.block_stride, page) for j, n in enumerate(numbers)
        )
        maps.append(where)
        groups.append(Group(store.kind, shape.block_tokens, store.attention_span, layers))
    geometry = RankGeometry(
        tp_rank=tp_rank,
        tp_size=engine.tp,
        pp_rank=stage,
        pp_size=len(engine.stages),
        num_blocks=engine.num_blocks,
        groups=tuple(groups),
        regions=(Region(address, engine.num_blocks * pool.block_bytes),),
    )
    return RankLayout(geometry, tuple(maps))


def _divided(page: PageFormat, engine: EngineShape, store: LayerCache, tp_rank: int) -> PageFormat:
    """Return the page of a rank that has a part of a block's tokens."""
    ranks = engine.dividing(store)
    if ranks == 1:
        return page
    interleave = Interleave(tp_rank % ranks, ranks, engine.turn_tokens)
    return replace(page, block_tokens=page.block_tokens * ranks, interleave=interleave)


@dataclass(frozen=True, slots=True)
class _Pool:
    """The block pool that all KV cache groups of a rank share."""

    slots: int  # number of slots per block: the number of layers of the largest group on this rank
    slot_bytes: int  # 0 if the pages of a block lie side by side, without slots
    block_bytes: int

    @classmethod
    def of(cls, engine: EngineShape, groups: Sequence[tuple[PageInterior, int]]) -> Self:
        """Return the pool of groups, given as (interior of a page, number of layers on this rank)."""
        slots = max(layers for _, layers in groups)
        interiors = [interior for interior, _ in groups]
        slot_bytes = _slot_bytes(engine, interiors)
        if engine.layout[0] != "B" or any(interior.snapshot for interior in interiors):
            return cls(slots, slot_bytes, slots * slot_bytes)
        alignment = max(interior.alignment for interior in interiors)
        # A block id belongs to one group at a time, so a block is as large as the largest group needs.
        widest = max(layers * interior.page_bytes for interior, layers in groups)
        return cls(slots, 0, round_up(widest, alignment))

    def room(self, interior: PageInterior) -> PoolRoom:
        if not self.slot_bytes:
            return PoolRoom(self.slots, block_stride=self.block_bytes)
        # A page map counts kernel blocks.
        return PoolRoom(self.slots, self.slot_bytes // interior.kernels)


def _slot_bytes(engine: EngineShape, interiors: Sequence[PageInterior]) -> int:
    boxes = sorted({(i.heads, i.tokens, i.content) for i in interiors})
    if len(boxes) > 1 and not is_compact(engine.layout):
        raise GeometryError(
            f"{engine.layout} has heads outside of pages, so all pages of a rank must have one shape, but "
            f"(heads, tokens, bytes) are {boxes}; use BLHNC or LBHNC"
        )
    slot_bytes = round_up(max(i.page_bytes for i in interiors), max(i.alignment for i in interiors))
    split = [i.page_bytes for i in interiors if i.kernels > 1]
    if split and min(split) < slot_bytes:
        raise GeometryError(
            f"pages of {min(split)} bytes in slots of {slot_bytes} leave a gap between blocks, so a block "
            f"cannot be made of {engine.kernels} kernel blocks; use blocks of {engine.kernel_tokens} tokens"
        )
    return slot_bytes
