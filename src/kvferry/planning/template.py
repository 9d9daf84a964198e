"""Templates: the copies from each rank of a peer to this rank, computed once per handshake.

A `Route` is a set of layers that share groups, block sizes and block strides on both sides. A `Template`
holds all routes from one source rank. This module also chooses the source rank of every field. If several
ranks hold copies, each part of the field is read from exactly one of them, and the readers are spread over
the copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from kvferry.errors import Incompatible
from kvferry.geometry import Field, GroupKind, Layer, PageFormat, RankGeometry
from kvferry.planning.cell_copy import CellCopy, merge_cell_copies
from kvferry.planning.descriptors import Descriptors, concatenate
from kvferry.planning.page_copy import PageCopy, differences, plan_page_copy
from kvferry.planning.scales import same_scales
from kvferry.planning.strided_copy import StridedCopy


@dataclass(frozen=True, kw_only=True)
class Route:
    """A set of layers that are read together from one source rank.

    The layers have the same KV cache group, block size and block stride on each side.

    A *cell* is the part of a block that is copied as one unit. The number of tokens per cell is the greatest
    common divisor of both block sizes.

    Attributes:
        src_group, dst_group: index of the layers' KV cache group on each side. The layers use the block table
            of that group.
        layers: names of the layers.
        cell_tokens: number of tokens per cell; 0 for a snapshot (recurrent state at one position).
        src_cells, dst_cells: number of cells per block on each side.
        src_stride, dst_stride: bytes from one block to the next on each side.
        src_blocks, dst_blocks: number of blocks in the pool of each side.
        cell_copies: strided copies of a cell, at the absolute addresses of block 0. For block ``b``, the
            offset ``b * stride`` is added. If layers lie at equal distances, one loop covers all of them. A
            cross-layer cache (the layers of a block are stored side by side) therefore needs only one strided
            copy.
    """

    src_group: int
    dst_group: int
    layers: tuple[str, ...]
    cell_tokens: int
    src_cells: int
    dst_cells: int
    src_stride: int
    dst_stride: int
    src_blocks: int
    dst_blocks: int
    cell_copies: tuple[CellCopy, ...]

    @property
    def cell_bytes(self) -> int:
        """Number of bytes that are copied per cell (part of a block), over all layers of the route."""
        return sum(copy.bytes for copy in self.copies)

    @property
    def copies(self) -> tuple[StridedCopy, ...]:
        """Strided copies (nested loops over runs of bytes) that together copy one cell (part of a block)."""
        return tuple(copy for cell_copy in self.cell_copies for copy in cell_copy.copies)

    @property
    def run_count(self) -> int:
        """Number of runs (contiguous ranges of bytes) per cell (part of a block), before runs are merged.

        The number is computed without listing the runs.
        """
        return sum(copy.run_count for copy in self.copies)

    @cached_property
    def runs(self) -> Descriptors:
        """Descriptors of the runs of one cell (part of a block). Each run is contiguous on both sides.

        Runs of the same `CellCopy` that are contiguous in both the source and the destination are merged into
        one.
        """
        return concatenate([cell_copy.descriptors for cell_copy in self.cell_copies])


@dataclass(frozen=True, slots=True)
class Template:
    """A precomputed set of all copy operations from one rank of the peer to this rank.

    It is computed once per handshake. Each transfer only adds the block ids.

    Attributes:
        src_rank: (pp_rank, tp_rank) of the peer's rank.
        routes: copies from that rank, one route per set of layers that are read together; empty if this rank
            reads nothing from that rank.
    """

    src_rank: tuple[int, int]
    routes: tuple[Route, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RouteKey:
    """The properties that layers must share to be in one route (set of layers that are read together).

    The page formats of the layers may differ.

    Attributes:
        src_group, dst_group: index of the layers' KV cache group on each side.
        src_tokens, dst_tokens: number of tokens per block on each side; 0 for a snapshot (recurrent state at
            one position).
        src_stride, dst_stride: bytes from one block to the next on each side.
        fields: names of the fields to copy, such as K and V.
    """

    src_group: int
    dst_group: int
    src_tokens: int
    dst_tokens: int
    src_stride: int
    dst_stride: int
    fields: frozenset[str]


_OTHER_SCALES = (
    "its quantised cache has other scales there than here; "
    "serve both engines from one checkpoint, with the same KV cache scales"
)


def build_templates(srcs: Sequence[RankGeometry], dst: RankGeometry) -> tuple[Template, ...]:
    """Compute the copies with which this rank reads from every rank of a peer.

    Layers of a draft model that the peer cannot supply are left out.

    Args:
        srcs: geometry of all ranks of the peer.
        dst: geometry of this rank.

    Returns:
        One template (all copies from one source rank) per source rank, in the order of `srcs`.

    Raises:
        Incompatible: the peer cannot supply a layer of the model or a part of a layer. The error lists all
            reasons.
    """
    found: dict[str, list[str]] = defaultdict(list)
    pages = _Pages()
    holders_of = _holders(srcs, pages)
    # Most layers of a model are alike, so the choice is cached.
    chosen_for: dict[_ChoiceKey, _Choice] = {}
    routes: list[dict[_RouteKey, list[tuple[Layer, Layer]]]] = [defaultdict(list) for _ in srcs]
    for dst_group, group in enumerate(dst.groups):
        for layer in group.layers:
            holders = holders_of[layer.identity]
            choice_key = (group.kind, pages.number(layer.page), tuple(h.choice_key for h in holders))
            if choice_key not in chosen_for:
                chosen_for[choice_key] = _choose(holders, group.kind, layer, dst.tp_rank)
            choice = chosen_for[choice_key]
            if choice.fields_by_holder and not all(same_scales(holder.layer, layer) for holder in holders):
                choice = _Choice(differences=(_OTHER_SCALES,))
            # The peer may lack layers of a draft model; `absent_layers` reports them.
            for text in choice.differences if not layer.draft else ():
                found[text].append(layer.name)
            for number, fields in choice.fields_by_holder:
                holder = holders[number]
                theirs = holder.layer
                key = _RouteKey(
                    src_group=holder.group,
                    dst_group=dst_group,
                    src_tokens=theirs.page.block_tokens,
                    dst_tokens=layer.page.block_tokens,
                    src_stride=theirs.block_stride,
                    dst_stride=layer.block_stride,
                    fields=fields,
                )
                routes[holder.index][key].append((theirs, layer))
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

    The caller must clear the blocks of these layers, because the blocks' old content may be NaN. A load
    without these layers is still correct, because the model verifies every token that a draft model proposes.

    Args:
        templates: copies from every rank of the peer to this rank, from `build_templates`.
        dst: geometry of this rank.
    """
    had = {name for template in templates for route in template.routes for name in route.layers}
    groups = (
        replace(group, layers=tuple(one for one in group.layers if one.draft and one.name not in had))
        for group in dst.groups
    )
    return replace(dst, groups=tuple(groups))


def absent_layer_names(srcs: Sequence[RankGeometry], dsts: Sequence[RankGeometry]) -> list[str]:
    """Return the names of all layers of draft models that the peer cannot supply.

    Args:
        srcs: geometry of all ranks of the peer.
        dsts: geometry of all ranks of this engine.

    Raises:
        Incompatible: the peer cannot supply a layer of the model itself.
    """
    left = [absent_layers(build_templates(srcs, rank), rank) for rank in dsts]
    return sorted({layer.name for rank in left for group in rank.groups for layer in group.layers})


class _Pages:
    """Assigns numbers to page formats, because numbers are faster to compare. Equal formats share a number.

    All numbered formats must live as long as this object, because a format is recognised by its ``id()``.
    """

    def __init__(self) -> None:
        self._numbers: dict[PageFormat, int] = {}
        self._seen: dict[int, int] = {}

    def number(self, page: PageFormat) -> int:
        """Return the number of a page format: the number of an equal earlier format, else the next number."""
        if (found := self._seen.get(id(page))) is not None:
            return found
        number = self._numbers.setdefault(page, len(self._numbers))
        self._seen[id(page)] = number
        return number


@dataclass(frozen=True, slots=True)
class _Holder:
    """A source rank that holds a layer.

    Attributes:
        index: index of the source rank.
        group: index, on that rank, of the KV cache group that contains the layer.
        kind: kind of the group.
        layer: geometry of the layer on that rank.
        choice_key: (index, kind, number of the page format). `build_templates` caches the result of `_choose`
            under a key that contains this value of every holder of the layer.
    """

    index: int
    group: int
    kind: GroupKind
    layer: Layer
    choice_key: tuple[int, GroupKind, int]


_ChoiceKey: TypeAlias = tuple[GroupKind, int, tuple[tuple[int, GroupKind, int], ...]]


@dataclass(frozen=True, slots=True)
class _Choice:
    """The source ranks that supply a layer.

    Attributes:
        fields_by_holder: for each chosen rank, (index in the list of source ranks that hold the layer, names
            of the fields to read from this rank).
        differences: reasons why the peer cannot supply the layer, one text each; empty if it can.
    """

    fields_by_holder: tuple[tuple[int, frozenset[str]], ...] = ()
    differences: tuple[str, ...] = ()


def _holders(srcs: Sequence[RankGeometry], pages: _Pages) -> dict[str, list[_Holder]]:
    """Return a ``defaultdict`` that maps `Layer.identity` to the source ranks that hold the layer.

    A layer that no rank holds has an empty list.

    Args:
        srcs: geometry of all ranks of the peer.
        pages: object that assigns numbers to page formats.
    """
    found: dict[str, list[_Holder]] = defaultdict(list)
    for index, src in enumerate(srcs):
        for number, group in enumerate(src.groups):
            for layer in group.layers:
                choice_key = (index, group.kind, pages.number(layer.page))
                found[layer.identity].append(_Holder(index, number, group.kind, layer, choice_key))
    return found


def _choose(holders: Sequence[_Holder], kind: GroupKind, layer: Layer, reader: int) -> _Choice:
    """Choose the source ranks from which the fields of a layer are read.

    Each part of a field is read from exactly one rank.

    Args:
        holders: source ranks that hold the layer.
        kind: kind of the destination's KV cache group.
        layer: geometry of the layer at the destination.
        reader: tensor-parallel rank of the destination. Among source ranks that hold the same part of a
            field, this number selects one, so that different readers use different source ranks.
    """
    if not holders:
        return _Choice(differences=("not in the peer's cache",))
    # Recurrent state and a cache of tokens cannot replace each other. Other kinds differ only in the tokens
    # that they need.
    if GroupKind.STATE in (kind, holders[0].kind) and kind is not holders[0].kind:
        return _Choice(differences=(f"{holders[0].kind} there, {kind} here",))
    pages = dict.fromkeys(holder.layer.page for holder in holders)
    if found := dict.fromkeys(text for page in pages for text in differences(page, layer.page)):
        return _Choice(differences=tuple(found))
    fields_of: dict[int, set[str]] = defaultdict(set)
    number_of = {holder.index: number for number, holder in enumerate(holders)}
    try:
        for field in layer.page.fields:
            for index in _cover(holders, field, reader):
                fields_of[number_of[index]].add(field.name)
    except Incompatible as error:
        return _Choice(differences=error.differences)
    return _Choice(tuple((number, frozenset(fields)) for number, fields in sorted(fields_of.items())))


def _cover(holders: Sequence[_Holder], field: Field, reader: int) -> list[int]:
    """Return the source ranks that together hold the destination's part of a field, without overlap.

    Args:
        holders: source ranks that hold the layer.
        field: layout of the field in the destination's page, with the part that the destination holds.
        reader: tensor-parallel rank of the destination. Among source ranks that hold the same part, this
            number selects one, so that different readers use different source ranks.

    Raises:
        Incompatible: some part is missing, the peer's ranks hold overlapping parts, or the ranks of both
            sides divide the field along different axes.
    """
    others = {h.index: next(f for f in h.layer.page.fields if f.name == field.name) for h in holders}
    sharded = {name for f in (field, *others.values()) for name, _, _ in f.held}
    if len(sharded) > 1:
        raise Incompatible(
            [f"field {field.name!r}: sharded along {' and '.join(sorted(sharded))}, not one axis"]
        )
    along = sharded.pop() if sharded else ""
    ranges: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, other in others.items():
        ranges[_range(other, along)].append(index)
    reached, high = _range(field, along)
    chosen: list[int] = []
    for (start, stop), copies in sorted(ranges.items()):
        if stop <= reached or start >= high:
            continue
        if start > reached:
            break
        if start < reached and chosen:
            raise Incompatible([f"field {field.name!r}: the peer's ranks hold overlapping parts"])
        chosen.append(copies[reader % len(copies)])
        reached = stop
    if reached < high:
        raise Incompatible([f"field {field.name!r}: no rank of the peer holds {along} [{reached}, {high})"])
    return chosen


def _range(field: Field, along: str) -> tuple[int, int]:
    """Return the range ``(start, stop)`` that a field holds of the axis named `along`.

    A field without such an axis counts as a single element, so its range is (0, 1).
    """
    axis = field.axis(along)
    return (axis.start, axis.stop) if axis else (0, 1)


def _route(
    key: _RouteKey, layers: list[tuple[Layer, Layer]], src: RankGeometry, dst: RankGeometry, pages: _Pages
) -> Route:
    by_formats: dict[tuple[int, int], list[tuple[Layer, Layer]]] = defaultdict(list)
    for theirs, ours in layers:
        by_formats[pages.number(theirs.page), pages.number(ours.page)].append((theirs, ours))
    found = [
        (
            plan_page_copy(of[0][0].page, of[0][1].page, key.fields),
            [(theirs.address, ours.address) for theirs, ours in of],
        )
        for of in by_formats.values()
    ]
    retiled = found[0][0]
    return Route(
        src_group=key.src_group,
        dst_group=key.dst_group,
        layers=tuple(layer.name for _, layer in layers),
        cell_tokens=retiled.cell_tokens,
        src_cells=retiled.src_cells,
        dst_cells=retiled.dst_cells,
        src_stride=key.src_stride,
        dst_stride=key.dst_stride,
        src_blocks=src.num_blocks,
        dst_blocks=dst.num_blocks,
        cell_copies=merge_cell_copies(_shift_to_block_zero(found)),
    )


def _shift_to_block_zero(found: Sequence[tuple[PageCopy, Sequence[tuple[int, int]]]]) -> Iterator[CellCopy]:
    """Yield the copies of one cell (part of a block) of all layers, at the absolute addresses of block 0.

    Args:
        found: (copy, addresses) for each pair of a source format and a destination format. The copy is the
            one between pages of these formats. The addresses are pairs (source, destination): the addresses
            of block 0 of each layer with these formats.
    """
    for retiled, addresses in found:
        for cell_copy in retiled.cell_copies:
            copies = tuple(copy.at(src, dst) for src, dst in addresses for copy in cell_copy.copies)
            yield CellCopy(cell_copy.src_offsets, cell_copy.dst_offsets, copies)


def window_mismatches(srcs: Sequence[RankGeometry], dst: RankGeometry) -> list[str]:
    """Return messages about layers for which the peer may keep fewer tokens than this rank needs.

    For example, the peer keeps too few if its hybrid KV cache manager is enabled and this engine's is not:
    this engine then treats sliding-window layers as full attention. There is one message per pair of group
    labels (the peer's and this rank's). The list is empty if the peer keeps enough tokens of all layers.

    Args:
        srcs: geometry of all ranks of the peer.
        dst: geometry of this rank.
    """
    theirs = {layer.identity: group for src in srcs for group in src.groups for layer in group.layers}
    found: dict[str, list[str]] = defaultdict(list)
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
    """Return a short text for a list of layers: the first name, and the number of further layers."""
    more = len(names) - 1
    return f"layer {names[0]!r}" + (f" and {more} more" if more else "")
