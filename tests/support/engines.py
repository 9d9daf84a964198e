"""Made-up engines: what a model's layers store, and where every rank of an engine keeps it.

A `Family` is what a layer stores, the same in every engine. An `EngineSpec` is everything in which engines
may differ: parallel sizes, block sizes, memory layout, interior of the pages. `ranks` turns both into
geometry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvferry.geometry import (
    NOT_INTERLEAVED,
    Axis,
    Field,
    Group,
    GroupKind,
    Interleave,
    Layer,
    PageFormat,
    RankGeometry,
    Region,
    opaque_page,
)

LAYOUTS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
SCATTERED = ("LHBNC", "BHLNC")
"""Layouts in which a page is not one stretch of memory: all layers must have the same shape."""


@dataclass(frozen=True)
class Stored:
    """One field of a family.

    `heads` is the total of the axis sharded over ranks (0: none, the field is replicated); `inner` are the
    totals of the other axes. A token axis is added where the family holds tokens.
    """

    name: str
    item_bytes: int
    heads: int
    inner: tuple[tuple[str, int], ...] = ()

    @property
    def run(self) -> int:
        """Bytes per head and token."""
        size = self.item_bytes
        for _, count in self.inner:
            size *= count
        return size


@dataclass(frozen=True)
class Family:
    """What a layer stores. `opaque_bytes` > 0: no fields, but a page of so many bytes nobody can read."""

    kind: GroupKind
    attention_span: int = 0
    fields: tuple[Stored, ...] = ()
    opaque_bytes: int = 0
    opaque_sharded: bool = False

    @property
    def snapshot(self) -> bool:
        return self.kind is GroupKind.STATE

    @property
    def run(self) -> int:
        return sum(field.run for field in self.fields)


@dataclass(frozen=True)
class Interior:
    """How one engine arranges a page: a plane per field or packed, what is transposed, unused bytes."""

    planes: bool = False
    transposed: frozenset[str] = frozenset()
    gap: int = 0


@dataclass(frozen=True)
class GroupSpec:
    """A group of one engine: layer numbers, and its page as kernel blocks of so many tokens.

    `turns`: (ranks that take turns along the tokens of a block, tokens per turn).
    """

    kind: GroupKind
    attention_span: int
    layers: tuple[int, ...]
    kernel_tokens: int
    kernels: int = 1
    turns: tuple[int, int] = (1, 1)

    @property
    def block_tokens(self) -> int:
        return self.kernel_tokens * self.kernels * self.turns[0]

    def interleave(self, rank: int) -> Interleave:
        ranks, interleave = self.turns
        return Interleave(rank % ranks, ranks, interleave) if ranks > 1 else NOT_INTERLEAVED


@dataclass(frozen=True)
class EngineSpec:
    """Everything in which two engines of one model may differ. `stages`: layers per pipeline rank.

    `pcp`: ranks of a stage for each of the `tp` that divide the heads.
    """

    tp: int
    stages: tuple[int, ...]
    groups: tuple[GroupSpec, ...]
    layout: str
    interior: Interior
    num_blocks: int
    address: int = 1 << 40
    pcp: int = 1

    def place(self, index: int) -> tuple[int, int]:
        """(which heads, which turn) of a rank of a stage: tensor-parallel ranks are neighbours."""
        outer, tp_rank = divmod(index, self.tp)
        return tp_rank, tp_rank * self.pcp + outer


def layer_name(number: int) -> str:
    return f"layers.{number}"


def shard(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """(start, count) of `total` heads on a rank; with fewer heads than ranks, neighbours share one."""
    if total % ranks == 0:
        return rank * (total // ranks), total // ranks
    if ranks % total == 0:
        return rank // (ranks // total), 1
    raise ValueError(f"{total} heads on {ranks} ranks")


def ranks(spec: EngineSpec, families: Sequence[Family]) -> list[RankGeometry]:
    """Geometry of every rank, pipeline-major; `families[n]` is what layer n stores."""
    found: list[RankGeometry] = []
    first = 0
    for stage, count in enumerate(spec.stages):
        on_stage = range(first, first + count)
        first += count
        found += [
            _rank(spec, families, stage, on_stage, index, spec.address + (len(found) + index << 32))
            for index in range(spec.tp * spec.pcp)
        ]
    return found


def _rank(
    spec: EngineSpec, families: Sequence[Family], stage: int, on_stage: range, index: int, address: int
) -> RankGeometry:
    """One buffer; layer j of every group lies on the same bytes as layer j of the others."""
    tp_rank, turn = spec.place(index)
    held = [[n for n in group.layers if n in on_stage] for group in spec.groups]
    slots = max(len(layers) for layers in held)
    groups = []
    length = 0
    if spec.layout in SCATTERED:
        place = _scattered(spec, families[on_stage[0]], tp_rank, slots)
        pages = {
            n: place.page(families[n], group.interleave(turn))
            for group, layers in zip(spec.groups, held, strict=True)
            for n in layers
        }
        slot_stride, block_stride, length = place.slot_stride, place.block_stride, place.length
    else:
        pages = {
            n: _contiguous(spec, families[n], group, tp_rank, group.interleave(turn))
            for group, layers in zip(spec.groups, held, strict=True)
            for n in layers
        }
        page_bytes = max(page.page_bytes for page in pages.values()) + spec.interior.gap
        if spec.layout[0] == "L":
            slot_stride, block_stride = spec.num_blocks * page_bytes, page_bytes
        else:
            slot_stride, block_stride = page_bytes, slots * page_bytes
        length = slots * spec.num_blocks * page_bytes
    for group, layers in zip(spec.groups, held, strict=True):
        placed = tuple(
            Layer(layer_name(n), address + slot * slot_stride, block_stride, pages[n])
            for slot, n in enumerate(layers)
        )
        groups.append(Group(group.kind, group.block_tokens, group.attention_span, placed))
    return RankGeometry(
        index, spec.tp * spec.pcp, stage, len(spec.stages), spec.num_blocks, tuple(groups),
        (Region(address, length),),
    )  # fmt: skip


@dataclass(frozen=True)
class _Place:
    """Strides of attention pages inside one rank's memory."""

    interior: Interior
    tp_rank: int
    tp: int
    kernels: int
    tokens: int
    kernel_stride: int
    head_stride: int
    token_stride: int
    slot_stride: int = 0
    block_stride: int = 0
    length: int = 0

    def page(self, family: Family, interleave: Interleave = NOT_INTERLEAVED) -> PageFormat:
        """The page of a token family: per head planes of a field each, or all fields packed per token."""
        fields = []
        offset = 0
        for stored in family.fields:
            transposed = stored.name in self.interior.transposed
            if self.interior.planes:
                token, scale = (stored.item_bytes, self.tokens) if transposed else (stored.run, 1)
                at, offset = offset, offset + self.tokens * stored.run
            else:
                token, scale = self.token_stride, 1
                at, offset = offset, offset + stored.run
            axes = [Axis("token", ((self.kernels, self.kernel_stride), (self.tokens, token)))]
            if stored.heads:
                start, count = shard(stored.heads, self.tp_rank, self.tp)
                axes.insert(0, Axis("head", ((count, self.head_stride),), start, stored.heads))
            axes += _dense(stored, scale)
            fields.append(Field(stored.name, stored.item_bytes, at, tuple(axes)))
        extent = max(field.extent()[1] for field in fields)
        tokens = self.kernels * self.tokens * interleave.ranks
        return PageFormat("attention", tokens, extent, tuple(fields), interleave)


def _dense(stored: Stored, scale: int = 1) -> list[Axis]:
    """The inner axes, the last fastest; strides times `scale`."""
    axes: list[Axis] = []
    stride = stored.item_bytes * scale
    for name, count in reversed(stored.inner):
        axes.insert(0, Axis(name, ((count, stride),)))
        stride *= count
    return axes


def _heads(family: Family, spec: EngineSpec, tp_rank: int) -> int:
    return max([shard(f.heads, tp_rank, spec.tp)[1] for f in family.fields if f.heads], default=1)


def _scattered(spec: EngineSpec, family: Family, tp_rank: int, slots: int) -> _Place:
    """[L,H,B,N,C] or [B,H,L,N,C]; a block is `kernels` neighbours along B."""
    group = spec.groups[0]
    heads, run = _heads(family, spec, tp_rank), family.run
    cell_copy = group.kernel_tokens * run
    blocks = spec.num_blocks * group.kernels
    if spec.layout == "LHBNC":
        kernel, head, slot = cell_copy, blocks * cell_copy, heads * blocks * cell_copy
    else:
        kernel, head, slot = heads * slots * cell_copy, slots * cell_copy, cell_copy
    return _Place(
        spec.interior, tp_rank, spec.tp, group.kernels, group.kernel_tokens,
        kernel, head, run, slot, group.kernels * kernel, slots * heads * blocks * cell_copy,
    )  # fmt: skip


def _contiguous(
    spec: EngineSpec, family: Family, group: GroupSpec, tp_rank: int, interleave: Interleave
) -> PageFormat:
    """A page that is one stretch of memory."""
    if family.opaque_bytes:
        of = (tp_rank, spec.tp) if family.opaque_sharded else (0, 1)
        return opaque_page("riddle", 0 if family.snapshot else group.block_tokens, family.opaque_bytes, *of)
    if family.snapshot:
        return _snapshot(spec, family, tp_rank)
    heads, run, tokens = _heads(family, spec, tp_rank), family.run, group.kernel_tokens
    outside = spec.layout.index("N") < spec.layout.index("H")
    head, token = (run, heads * run) if outside else (tokens * run, run)
    interior = replace(spec.interior, planes=spec.interior.planes and not outside)
    place = _Place(interior, tp_rank, spec.tp, group.kernels, tokens, heads * tokens * run, head, token)
    return place.page(family, interleave)


def _snapshot(spec: EngineSpec, family: Family, tp_rank: int) -> PageFormat:
    """Fields one after the other, each [heads][inner] or, transposed, [inner][heads]."""
    fields = []
    at = spec.interior.gap
    for stored in family.fields:
        start, count = shard(stored.heads, tp_rank, spec.tp) if stored.heads else (0, 1)
        turned = stored.name in spec.interior.transposed
        axes = _dense(stored, count if turned else 1)
        if stored.heads:
            stride = stored.item_bytes if turned else stored.run
            axes.append(Axis("head", ((count, stride),), start, stored.heads))
        fields.append(Field(stored.name, stored.item_bytes, at, tuple(axes)))
        at += count * stored.run
    return PageFormat("state", 0, at, tuple(fields))
