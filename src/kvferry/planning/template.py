"""Templates: everything that one rank reads from each rank of a peer, computed once per handshake.

A `Route` is a set of layers that share a source group, a destination group and a page copy. A `Template`
holds all routes from one source rank. This module also chooses the source rank of every field: each part is
read exactly once, however many ranks hold a copy, and readers are spread over the copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from kvferry.errors import Incompatible
from kvferry.geometry import Field, GroupKind, Layer, PageFormat, RankGeometry
from kvferry.planning.cell_copy import CellCopy, joined
from kvferry.planning.descriptors import Descriptors, concatenate
from kvferry.planning.page_copy import PageCopy, differences, plan_page_copy
from kvferry.planning.scales import same_scales
from kvferry.planning.strided_copy import StridedCopy


@dataclass(frozen=True, kw_only=True)
class Route:
    """Layers that are read from one source rank with the same page copy.

    Attributes:
        src_group, dst_group: index of the group on each side; its block table applies.
        layers: names of the layers.
        cell_tokens: tokens of a cell, 0 for a snapshot.
        src_cells, dst_cells: cells per block.
        src_stride, dst_stride: bytes between blocks.
        src_blocks, dst_blocks: blocks in each pool.
        cell_copies: strided copies of a cell at absolute addresses of block 0; add ``b * stride`` for block
            ``b``. Layers at regular distances are one more loop. So a cross-layer cache, which stores a
            block's layers side by side, has one strided copy, often of one run.
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
        """Bytes of a cell, the same for every cell of a route."""
        return sum(nest.bytes for nest in self.nests)

    @property
    def nests(self) -> tuple[StridedCopy, ...]:
        """Strided copies of all cell copies."""
        return tuple(nest for cell_copy in self.cell_copies for nest in cell_copy.nests)

    @property
    def row_count(self) -> int:
        """Upper bound of the number of `rows`, without expanding them."""
        return sum(nest.rows for nest in self.nests)

    @cached_property
    def rows(self) -> Descriptors:
        """Runs of a cell, expanded per cell copy; runs that touch on both sides are merged."""
        return concatenate([cell_copy.descriptors for cell_copy in self.cell_copies])


@dataclass(frozen=True, slots=True)
class Template:
    """All routes from one rank of the peer to this rank.

    Attributes:
        src_rank: (pp_rank, tp_rank) of the peer's rank.
        routes: empty if nothing is read from that rank.
    """

    src_rank: tuple[int, int]
    routes: tuple[Route, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RouteKey:
    """The properties that layers of one route share. Their pages may differ."""

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
    """Return the templates of `dst` for every rank of a peer.

    Args:
        srcs: all ranks of the peer.
        dst: this rank.

    Returns:
        One template per source rank, in the order of `srcs`.

    Raises:
        Incompatible: the peer cannot supply some layer or part of a field; names all differences. A draft
            model's layer that it cannot supply is left out instead.
    """
    found: dict[str, list[str]] = defaultdict(list)
    pages = _Pages()
    holders_of = _holders(srcs, pages)
    # Most layers of a model are alike, and so is the choice.
    chosen_for: dict[_Alike, _Choice] = {}
    routes: list[dict[_RouteKey, list[tuple[Layer, Layer]]]] = [defaultdict(list) for _ in srcs]
    for dst_group, group in enumerate(dst.groups):
        for layer in group.layers:
            holders = holders_of[layer.identity]
            alike = (group.kind, pages.number(layer.page), tuple(h.alike for h in holders))
            if alike not in chosen_for:
                chosen_for[alike] = _choose(holders, group.kind, layer, dst.tp_rank)
            choice = chosen_for[alike]
            if choice.takes and not all(same_scales(holder.layer, layer) for holder in holders):
                choice = _Choice(differences=(_OTHER_SCALES,))
            for text in choice.differences if not layer.draft else ():  # see `absent_layers`
                found[text].append(layer.name)
            for number, fields in choice.takes:
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
    """Return this rank's geometry, reduced to the draft layers that no rank of a peer supplies.

    The caller must clear these layers' blocks. A load without them is still correct, because the model
    verifies every token that a draft proposes; but the blocks' former content may be NaN.

    Args:
        templates: result of `build_templates` for `dst`.
        dst: this rank.
    """
    had = {name for template in templates for route in template.routes for name in route.layers}
    groups = (
        replace(group, layers=tuple(one for one in group.layers if one.draft and one.name not in had))
        for group in dst.groups
    )
    return replace(dst, groups=tuple(groups))


def absent_layer_names(srcs: Sequence[RankGeometry], dsts: Sequence[RankGeometry]) -> list[str]:
    """Return the names of all draft layers that the peer cannot supply.

    Args:
        srcs: ranks of a peer.
        dsts: ranks of this engine.

    Raises:
        Incompatible: see `build_templates`.
    """
    left = [absent_layers(build_templates(srcs, rank), rank) for rank in dsts]
    return sorted({layer.name for rank in left for group in rank.groups for layer in group.layers})


class _Pages:
    """Numbers page formats; equal formats share a number, which is quicker to compare.

    Mutated by `number`. The formats must outlive this object, which recognises them by identity.
    """

    def __init__(self) -> None:
        self._numbers: dict[PageFormat, int] = {}
        self._seen: dict[int, int] = {}

    def number(self, page: PageFormat) -> int:
        """Return the number of a format, a new one if none is equal to it."""
        if (found := self._seen.get(id(page))) is not None:
            return found
        number = self._numbers.setdefault(page, len(self._numbers))
        self._seen[id(page)] = number
        return number


@dataclass(frozen=True, slots=True)
class _Holder:
    """A layer on one source rank. Holders with equal `alike` lead to the same choice."""

    index: int
    group: int
    kind: GroupKind
    layer: Layer
    alike: tuple[int, GroupKind, int]


_Alike: TypeAlias = tuple[GroupKind, int, tuple[tuple[int, GroupKind, int], ...]]


@dataclass(frozen=True, slots=True)
class _Choice:
    """The source ranks that supply a layer.

    Attributes:
        takes: (index of a holder, names of the fields that it supplies).
        differences: reasons why no rank can supply it, a sentence each.
    """

    takes: tuple[tuple[int, frozenset[str]], ...] = ()
    differences: tuple[str, ...] = ()


def _holders(srcs: Sequence[RankGeometry], pages: _Pages) -> dict[str, list[_Holder]]:
    """Map each layer's identity to the source ranks that hold it; an empty list if none does."""
    found: dict[str, list[_Holder]] = defaultdict(list)
    for index, src in enumerate(srcs):
        for number, group in enumerate(src.groups):
            for layer in group.layers:
                alike = (index, group.kind, pages.number(layer.page))
                found[layer.identity].append(_Holder(index, number, group.kind, layer, alike))
    return found


def _choose(holders: Sequence[_Holder], kind: GroupKind, layer: Layer, reader: int) -> _Choice:
    """Choose the holders that supply the fields, so that each part of a field comes from exactly one."""
    if not holders:
        return _Choice(differences=("not in the peer's cache",))
    # A snapshot and a token cache cannot stand for each other; other kinds only clip differently.
    if GroupKind.STATE in (kind, holders[0].kind) and kind is not holders[0].kind:
        return _Choice(differences=(f"{holders[0].kind} there, {kind} here",))
    pages = dict.fromkeys(holder.layer.page for holder in holders)
    if found := dict.fromkeys(text for page in pages for text in differences(page, layer.page)):
        return _Choice(differences=tuple(found))
    takes: dict[int, set[str]] = defaultdict(set)
    number_of = {holder.index: number for number, holder in enumerate(holders)}
    try:
        for field in layer.page.fields:
            for index in _cover(holders, field, reader):
                takes[number_of[index]].add(field.name)
    except Incompatible as error:
        return _Choice(differences=error.differences)
    return _Choice(tuple((number, frozenset(fields)) for number, fields in sorted(takes.items())))


def _cover(holders: Sequence[_Holder], field: Field, reader: int) -> list[int]:
    """Return source ranks whose ranges cover `field`'s, each part once; `reader` selects among copies."""
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
    """Return the range of an axis that a field holds; (0, 1) for a field that is not sharded."""
    axis = field.axis(along)
    return (axis.start, axis.stop) if axis else (0, 1)


def _route(
    key: _RouteKey, layers: list[tuple[Layer, Layer]], src: RankGeometry, dst: RankGeometry, pages: _Pages
) -> Route:
    alike: dict[tuple[int, int], list[tuple[Layer, Layer]]] = defaultdict(list)
    for theirs, ours in layers:
        alike[pages.number(theirs.page), pages.number(ours.page)].append((theirs, ours))
    found = [
        (
            plan_page_copy(of[0][0].page, of[0][1].page, key.fields),
            [(theirs.address, ours.address) for theirs, ours in of],
        )
        for of in alike.values()
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
        cell_copies=joined(_placed(found)),
    )


def _placed(found: Sequence[tuple[PageCopy, Sequence[tuple[int, int]]]]) -> Iterator[CellCopy]:
    """Yield the cell copies of every layer at absolute addresses."""
    for retiled, addresses in found:
        for cell_copy in retiled.cell_copies:
            nests = tuple(nest.at(src, dst) for src, dst in addresses for nest in cell_copy.nests)
            yield CellCopy(cell_copy.src_at, cell_copy.dst_at, nests)


def window_mismatches(srcs: Sequence[RankGeometry], dst: RankGeometry) -> list[str]:
    """Return the layers of which the peer keeps fewer tokens than this rank needs of long prompts.

    This happens if the hybrid cache manager is enabled there and disabled here, so that windowed layers are
    full attention here.
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
    """Return the name of the first layer and the number of others, because differences repeat per layer."""
    more = len(names) - 1
    return f"layer {names[0]!r}" + (f" and {more} more" if more else "")
