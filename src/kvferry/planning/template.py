"""Templates: the copies from each rank of a peer to this rank, computed once per handshake.

A `Route` is a set of layers that share groups, block sizes, interleaves and block strides on both sides. A
`Template` holds all routes from one source rank. Each part of a field is read from exactly one source rank.
If several ranks hold copies, the readers are spread over them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from kvferry.common.errors import Incompatible
from kvferry.geometry import NOT_INTERLEAVED, Field, GroupKind, Interleave, Layer, PageFormat, RankGeometry
from kvferry.planning.cell_copy import CellCopy, PageCopy, differences, merge_cell_copies, plan_page_copy
from kvferry.planning.descriptors import Descriptors, Int64s, concatenate
from kvferry.planning.strided_copy import StridedCopy


def _same_scales(a: Layer, b: Layer) -> bool:
    """Return True if two ranks have equal quantisation scales for all heads of a layer that both hold.

    >>> from kvferry.geometry import Axis, Field, PageFormat, Scale
    >>> def layer(first, *scales):
    ...     k = Field("k", 1, 0, (Axis("head", ((2, 1),), first, 4),))
    ...     return Layer("layers.0", 0, 2, PageFormat("fp8", 0, 2, (k,)), scales)
    >>> _same_scales(layer(0, Scale("k", (0.5,))), layer(2))  # scales of all heads: 0.5 and 1
    False
    >>> _same_scales(layer(0, Scale("k", (0.5, 0.25))), layer(1, Scale("k", (0.25, 0.125))))  # head 1: 0.25
    True
    """
    if not (a.scales or b.scales):
        return True
    sides = []
    for layer in (a, b):
        axes = [axis for field in layer.page.fields if (axis := field.axis("head"))]
        heads = range(axes[0].start, axes[0].stop) if axes else range(1)
        sides.append((heads, {scale.source: scale.factors for scale in layer.scales}))
    (heads_a, scales_a), (heads_b, scales_b) = sides
    low, high = max(heads_a.start, heads_b.start), min(heads_a.stop, heads_b.stop)
    for source in scales_a.keys() | scales_b.keys():
        # A layer without a scale has scale 1.
        ours, theirs = scales_a.get(source, (1.0,)), scales_b.get(source, (1.0,))
        # A single factor holds for all heads of the layer, also for those that the other rank does not have.
        if len(ours) == len(theirs) == 1:
            if ours != theirs:
                return False
            continue
        for head in range(low, high):
            one = ours[head - heads_a.start] if len(ours) > 1 else ours[0]
            if one != (theirs[head - heads_b.start] if len(theirs) > 1 else theirs[0]):
                return False
    return True


class _RunKind(NamedTuple):
    """Runs of equal length in one cell of a route.

    `offsets` are the byte offsets of each cell in its block, on each side, int64. None if such runs of
    consecutive cells cannot be contiguous on both sides, whatever the block ids.
    """

    length: int  # bytes of each run
    number: int  # of such runs per cell
    offsets: tuple[Int64s, Int64s] | None


@dataclass(frozen=True, kw_only=True)
class Route:
    """A set of layers that are read together from one source rank.

    If layers lie at equal distances, one loop of `cell_copies` covers all of them, so a cross-layer cache
    needs only one strided copy.
    """

    src_group: int  # index of the layers' group, whose block table they use, on each side
    dst_group: int
    layers: tuple[str, ...]
    cell_tokens: int  # 0 for a snapshot
    src_cells: int  # cells per page
    dst_cells: int
    src_stride: int  # bytes from one block to the next
    dst_stride: int
    src_blocks: int  # in the pool
    dst_blocks: int
    cell_copies: tuple[CellCopy, ...]  # of a cell of block 0, at absolute addresses
    src_interleave: Interleave = NOT_INTERLEAVED  # of the cells of a sequence, with context parallelism
    dst_interleave: Interleave = NOT_INTERLEAVED

    @cached_property
    def interleaves(self) -> tuple[Interleave, ...]:
        """Those of the sides whose pages hold only some cells."""
        sides = self.src_interleave, self.dst_interleave
        return tuple(side for side in sides if side != NOT_INTERLEAVED)

    @cached_property
    def dst_block_cells(self) -> int:
        """Cells of the tokens that a block of the destination covers, over all its ranks."""
        return self.dst_cells * self.dst_interleave.ranks

    @cached_property
    def cell_bytes(self) -> int:
        """Bytes that are copied per cell, over all layers of the route."""
        return sum(copy.bytes for copy in self.copies)

    @property
    def copies(self) -> tuple[StridedCopy, ...]:
        found: list[StridedCopy] = []
        for cell_copy in self.cell_copies:
            found += cell_copy.copies
        return tuple(found)

    @property
    def run_count(self) -> int:
        # `runs` lists them, which is slow if there are many. This number tells beforehand.
        """Number of runs per cell, before runs are merged."""
        return sum(copy.run_count for copy in self.copies)

    @cached_property
    def runs(self) -> Descriptors:
        """Runs of one cell, merged inside each `CellCopy` if contiguous on both sides."""
        return concatenate([cell_copy.descriptors for cell_copy in self.cell_copies])

    @cached_property
    def run_kinds(self) -> tuple[_RunKind, ...]:
        """The `runs`, counted by their length and by the offsets of their cells."""
        found = []
        for one in self.cell_copies:
            offsets = np.array(one.src_offsets, np.int64), np.array(one.dst_offsets, np.int64)
            # Distances from a cell to the next one, in its own block or in the block behind it.
            steps = [
                {*np.diff(at).tolist(), stride + int(at[0] - at[-1])}
                for at, stride in zip(offsets, (self.src_stride, self.dst_stride), strict=True)
            ]
            lengths, numbers = np.unique(one.descriptors.length, return_counts=True)
            for length, number in zip(lengths.tolist(), numbers.tolist(), strict=True):
                touch = all(length in each for each in steps)
                found.append(_RunKind(length, number, offsets if touch else None))
        return tuple(found)

    @cached_property
    def runs_per_cell(self) -> int:
        return sum(kind.number for kind in self.run_kinds)

    @cached_property
    def longest_run(self) -> int:
        """Length in bytes of the longest run of one cell."""
        return max((kind.length for kind in self.run_kinds), default=0)

    @cached_property
    def mergeable_runs(self) -> tuple[tuple[int, int, tuple[Int64s, Int64s]], ...]:
        """The `run_kinds` that may merge with those of the next cell: (length, number, offsets)."""
        return tuple((length, number, at) for length, number, at in self.run_kinds if at is not None)


@dataclass(frozen=True, slots=True)
class Template:
    """All copies from one rank of the peer, (pp_rank, tp_rank), to this rank: none if it supplies nothing."""

    src_rank: tuple[int, int]
    routes: tuple[Route, ...]


_Pair: TypeAlias = tuple[Layer, Layer]
_RouteKey: TypeAlias = tuple[
    int, int, frozenset[str], tuple[int, Interleave, int, Interleave], tuple[int, int]
]

_OTHER_SCALES = (
    "its quantised cache has other scales there than here; "
    "serve both engines from one checkpoint, with the same KV cache scales"
)


def build_templates(srcs: Sequence[RankGeometry], dst: RankGeometry) -> tuple[Template, ...]:
    """Compute the copies with which this rank reads from every rank of a peer, in the order of `srcs`.

    Layers of a draft model that the peer cannot supply are left out. Raise Incompatible for any other layer,
    or part of one, that it cannot supply.
    """
    found: dict[str, list[str]] = defaultdict(list)
    pages = _Pages()
    holders_of = _holders(srcs, pages)
    # Most layers of a model are alike, so the choice is cached.
    chosen_for: dict[_ChoiceKey, tuple[_Choice, tuple[str, ...]]] = {}
    routes: list[dict[_RouteKey, list[_Pair]]] = [defaultdict(list) for _ in srcs]
    for dst_group, group in enumerate(dst.groups):
        for layer in group.layers:
            holders = holders_of[layer.identity]
            choice_key = (group.kind, pages.number(layer.page), tuple(h.choice_key for h in holders))
            if choice_key not in chosen_for:
                try:
                    chosen_for[choice_key] = _choose(holders, group.kind, layer, dst.tp_rank), ()
                except Incompatible as error:
                    chosen_for[choice_key] = (), error.differences
            chosen, reasons = chosen_for[choice_key]
            if chosen and not all(_same_scales(holder.layer, layer) for holder in holders):
                chosen, reasons = (), (_OTHER_SCALES,)
            # A peer without the draft model is still a good source; `absent_layers` reports the layers.
            for text in reasons if not layer.draft else ():
                found[text].append(layer.name)
            for number, fields in chosen:
                holder = holders[number]
                theirs = holder.layer
                # A route has one cell size and one stride per side. Page formats may differ inside a route.
                src, dst_page = theirs.page, layer.page
                tokens = src.block_tokens, src.interleave, dst_page.block_tokens, dst_page.interleave
                strides = theirs.block_stride, layer.block_stride
                routes[holder.index][holder.group, dst_group, fields, tokens, strides].append((theirs, layer))
    if found:
        raise Incompatible([f"{_named_layers(names)}: {text}" for text, names in found.items()])
    return tuple(
        Template(
            (src.pp_rank, src.tp_rank),
            tuple(_route(key, layers, src, dst, pages) for key, layers in routes[i].items()),
        )
        for i, src in enumerate(srcs)
    )


def absent_layers(templates: Sequence[Template], dst: RankGeometry) -> RankGeometry:
    """Return this rank's geometry, reduced to the draft model's layers that no rank of the peer supplies.

    The caller must clear the blocks of these layers, because the blocks' old content may be NaN.
    """
    # A load without them is correct: the model verifies every token that a draft model proposes.
    had = {name for template in templates for route in template.routes for name in route.layers}
    groups = (
        replace(group, layers=tuple(one for one in group.layers if one.draft and one.name not in had))
        for group in dst.groups
    )
    return replace(dst, groups=tuple(groups))


def absent_layer_names(srcs: Sequence[RankGeometry], dsts: Sequence[RankGeometry]) -> list[str]:
    """Return the names of all layers of draft models that the peer cannot supply.

    Raise Incompatible if the peer cannot supply a layer of the model itself.
    """
    left = [absent_layers(build_templates(srcs, rank), rank) for rank in dsts]
    return sorted({layer.name for rank in left for group in rank.groups for layer in group.layers})


class _Pages:
    """Assigns numbers to page formats, which must live as long as this object. Equal formats share one."""

    # A handshake compares the formats of every layer on every rank, and numbers are faster to compare.
    def __init__(self) -> None:
        self._numbers: dict[PageFormat, int] = {}
        self._seen: dict[int, int] = {}

    def number(self, page: PageFormat) -> int:
        if (found := self._seen.get(id(page))) is not None:
            return found
        number = self._numbers.setdefault(page, len(self._numbers))
        self._seen[id(page)] = number
        return number


@dataclass(frozen=True, slots=True)
class _Holder:
    """A source rank, given by its index, that holds a layer in one of its groups.

    Layers whose holders have equal keys, (index, kind, number of the page format), get the same `_Choice`.
    """

    index: int
    group: int
    kind: GroupKind
    layer: Layer
    choice_key: tuple[int, GroupKind, int]


_ChoiceKey: TypeAlias = tuple[GroupKind, int, tuple[tuple[int, GroupKind, int], ...]]


# Of each rank that supplies a layer: index in the list of the layer's holders, names of the fields to read.
_Choice: TypeAlias = tuple[tuple[int, frozenset[str]], ...]


def _holders(srcs: Sequence[RankGeometry], pages: _Pages) -> dict[str, list[_Holder]]:
    """Return the source ranks that hold each layer, by `Layer.identity`."""
    found: dict[str, list[_Holder]] = defaultdict(list)
    for index, src in enumerate(srcs):
        for number, group in enumerate(src.groups):
            for layer in group.layers:
                choice_key = (index, group.kind, pages.number(layer.page))
                found[layer.identity].append(_Holder(index, number, group.kind, layer, choice_key))
    return found


def _choose(holders: Sequence[_Holder], kind: GroupKind, layer: Layer, reader: int) -> _Choice:
    if not holders:
        raise Incompatible(["not in the peer's cache"])
    # Recurrent state and a cache of tokens cannot replace each other. Other kinds differ only in the tokens
    # that they need.
    if GroupKind.STATE in (kind, holders[0].kind) and kind is not holders[0].kind:
        raise Incompatible([f"{holders[0].kind} there, {kind} here"])
    found = dict[str, None]()
    for page in dict.fromkeys(holder.layer.page for holder in holders):
        found.update(dict.fromkeys(differences(page, layer.page)))
    if found:
        raise Incompatible(list(found))
    fields_of: dict[int, set[str]] = defaultdict(set)
    wanted = layer.page.interleave
    # Ranks that divide the tokens of a head all hold this head.
    for numbers in _by_interleave(holders, wanted):
        for field in layer.page.fields:
            for number in _cover(holders, numbers, field, reader // wanted.ranks):
                fields_of[number].add(field.name)
    return tuple((number, frozenset(fields)) for number, fields in sorted(fields_of.items()))


def _by_interleave(holders: Sequence[_Holder], wanted: Interleave) -> list[list[int]]:
    """Return the indices of the holders of equal tokens, for all that hold some of the wanted tokens."""
    found: dict[Interleave, list[int]] = defaultdict(list)
    for number, holder in enumerate(holders):
        found[holder.layer.page.interleave].append(number)
    turns = {(one.ranks, one.size) for one in found}
    if len(turns) > 1:
        raise Incompatible(["the peer's ranks divide the tokens of a block in different ways"])
    ((ranks, size),) = turns
    needed = [one for rank in range(ranks) if (one := Interleave(rank, ranks, size)).meets(wanted)]
    if missing := [one.rank for one in needed if one not in found]:
        raise Incompatible([f"no rank of the peer holds the tokens of turn {missing[0]} of {ranks}"])
    return [found[one] for one in needed]


def _cover(holders: Sequence[_Holder], numbers: Sequence[int], field: Field, reader: int) -> list[int]:
    """Return those of the holders' indices that together hold the destination's part of a field once.

    Raise Incompatible if some part is missing, the holders' parts overlap, or the ranks of both sides divide
    the field along different axes.
    """
    others = {n: f for n in numbers for f in holders[n].layer.page.fields if f.name == field.name}
    sharded = {name for f in (field, *others.values()) for name, _, _ in f.held}
    if len(sharded) > 1:
        raise Incompatible(
            [f"field {field.name!r}: sharded along {' and '.join(sorted(sharded))}, not one axis"]
        )
    along = sharded.pop() if sharded else ""
    ranges: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, other in others.items():
        ranges[_range(other, along)].append(number)
    reached, high = _range(field, along)
    chosen: list[int] = []
    for (start, stop), copies in sorted(ranges.items()):
        if stop <= reached or start >= high:
            continue
        if start > reached:
            break
        if start < reached and chosen:
            raise Incompatible([f"field {field.name!r}: the peer's ranks hold overlapping parts"])
        # Different readers use different ranks of those that hold copies.
        chosen.append(copies[reader % len(copies)])
        reached = stop
    if reached < high:
        raise Incompatible([f"field {field.name!r}: no rank of the peer holds {along} [{reached}, {high})"])
    return chosen


def _range(field: Field, along: str) -> tuple[int, int]:
    """Return the range ``(start, stop)`` that a field holds of an axis; (0, 1) without such an axis."""
    axis = field.axis(along)
    return (axis.start, axis.stop) if axis else (0, 1)


def _route(key: _RouteKey, layers: list[_Pair], src: RankGeometry, dst: RankGeometry, pages: _Pages) -> Route:
    src_group, dst_group, fields, *_ = key
    # Most layers are alike, so a copy is planned once per pair of page formats and shifted to each layer.
    planned, parts = dict[tuple[int, int], PageCopy](), list[CellCopy]()
    for theirs, ours in layers:
        formats = pages.number(theirs.page), pages.number(ours.page)
        if formats not in planned:
            planned[formats] = plan_page_copy(theirs.page, ours.page, fields)
        for one in planned[formats].cell_copies:
            copies = tuple(copy.at(theirs.address, ours.address) for copy in one.copies)
            parts.append(CellCopy(one.src_offsets, one.dst_offsets, copies))
    page_copy, (first_src, first_dst) = next(iter(planned.values())), layers[0]
    return Route(
        src_group=src_group,
        dst_group=dst_group,
        layers=tuple(layer.name for _, layer in layers),
        cell_tokens=page_copy.cell_tokens,
        src_cells=page_copy.src_cells,
        dst_cells=page_copy.dst_cells,
        src_stride=first_src.block_stride,
        dst_stride=first_dst.block_stride,
        src_blocks=src.num_blocks,
        dst_blocks=dst.num_blocks,
        cell_copies=merge_cell_copies(parts),
        src_interleave=page_copy.src_interleave,
        dst_interleave=page_copy.dst_interleave,
    )


def window_mismatches(srcs: Sequence[RankGeometry], dst: RankGeometry) -> list[str]:
    """Return messages about layers for which the peer may keep fewer tokens than this rank needs."""
    theirs = {layer.identity: group for src in srcs for group in src.groups for layer in group.layers}
    found: dict[str, list[str]] = defaultdict(list)
    # If only this engine's hybrid KV cache manager is disabled, it treats sliding windows as full attention
    # and needs tokens that the peer has freed.
    for group in dst.groups:
        for layer in group.layers:
            other = theirs.get(layer.identity)
            if other is None or not other.attention_span:
                continue
            if (
                not group.attention_span
                or group.kind is not other.kind
                or group.attention_span > other.attention_span
            ):
                found[f"{other.label} there, {group.label} here"].append(layer.name)
    hint = "run both with the same cache manager"
    return [f"{_named_layers(names)}: {text}; {hint}" for text, names in found.items()]


def _named_layers(names: Sequence[str]) -> str:
    more = len(names) - 1
    return f"layer {names[0]!r}" + (f" and {more} more" if more else "")
