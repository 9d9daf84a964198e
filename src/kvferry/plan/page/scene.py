"""The content of a picture of one group, for all of its layers or for one.

A *lane* is the memory of one rank. A *ribbon* is a copied run of bytes between two lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.geometry import RankGeometry
from kvferry.plan.page.draw import Ribbon
from kvferry.plan.page.place import MemoryLane
from kvferry.plan.page.runs import by_strip, cut, runs_of
from kvferry.plan.page.strips import rank_label, strips
from kvferry.plan.setting import PlannedTransfer
from kvferry.planning.template import Route

MAX_RANKS = 4
"""Maximum number of drawn ranks per side."""
MAX_STRIPS = 1200
"""Maximum number of strips in a picture of several layers. Layers are left out if there are more strips."""
MAX_RIBBONS = 600
"""Maximum number of runs that are drawn one by one. If there are more, runs between two strips are joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The content of a picture that shows how blocks of a KV cache group are copied between two engines.

    A lane is the row of strips (contiguous pieces of memory) of one rank. A ribbon is a band that connects
    copied bytes of both sides. A run is a range of bytes that is contiguous on both sides.

    Attributes:
        src, dst: lanes of the source and of the destination, each with at least one strip.
        ribbons: bands between the lanes.
        layers: names of the drawn layers.
        of_layers: number of layers of the group on the drawn ranks.
        src_blocks, dst_blocks: number of drawn blocks at the source, and at the destination.
        runs: number of copied runs between the drawn blocks.
        joined: True if some ribbon stands for several runs.
    """

    src: tuple[MemoryLane, ...]
    dst: tuple[MemoryLane, ...]
    ribbons: tuple[Ribbon, ...]
    layers: tuple[str, ...]
    of_layers: int
    src_blocks: int
    dst_blocks: int
    runs: int
    joined: bool


def scene(setting: PlannedTransfer, group: int, *, one_layer: bool) -> Scene | None:
    """Return the content of the picture that shows the copies of one KV cache group.

    At most `MAX_RANKS` ranks are drawn per side. If the KV cache groups of the two engines contain different
    layers, the picture shows only layers that share a block table on both sides. Layers are left out if the
    picture would have more than `MAX_STRIPS` strips (contiguous pieces of memory).

    Args:
        setting: both engines, and the request to transfer.
        group: index of the group at the destination.
        one_layer: False to draw all layers, with one band per pair of strips. True to draw only the first
            layer, with one band per copied range of bytes. If there are more than `MAX_RIBBONS` ranges, this
            layer also has one band per pair of strips.

    Returns:
        The content; None if no layer of the group is copied between the drawn ranks.
    """
    srcs, dsts = setting.srcs[:MAX_RANKS], setting.dsts[:MAX_RANKS]
    routes = [
        (src, dst, route)
        for dst in range(len(dsts))
        for src, template in enumerate(setting.templates(dst)[:MAX_RANKS])
        for route in template.routes
        if route.dst_group == group
    ]
    if not routes:
        return None
    groups = (routes[0][2].src_group, group)
    routes = [each for each in routes if each[2].src_group == groups[0]]
    blocks = _blocks(routes[0][2])
    shared = {layer.name for rank in srcs for layer in rank.groups[groups[0]].layers}
    every = [name for name in _names(dsts, group) if name in shared]
    names = every[:1] if one_layer else every
    above, below = _sides(srcs, dsts, groups, names, blocks)
    while len(names) > 1 and sum(len(lane.strips) for lane in (*above, *below)) > MAX_STRIPS:
        names = names[: len(names) // 2]
        above, below = _sides(srcs, dsts, groups, names, blocks)
    parts = [
        (src, dst, [list(cut(run, above[src].strips, below[dst].strips)) for run in runs_of(route, *blocks)])
        for src, dst, route in routes
    ]
    runs = sum(bool(run) for _, _, of in parts for run in of)
    joined = not one_layer or runs > MAX_RIBBONS
    ribbons = []
    for src, dst, of in parts:
        each = [part for run in of for part in run]
        ribbons += [Ribbon(src, dst, run) for run in (by_strip(each) if joined else (p for _, _, p in each))]
    return _shown(
        above=above, below=below, ribbons=ribbons, names=names, of_layers=len(every), blocks=blocks, runs=runs
    )


def _shown(
    above: Sequence[MemoryLane],
    below: Sequence[MemoryLane],
    ribbons: Sequence[Ribbon],
    names: Sequence[str],
    of_layers: int,
    blocks: tuple[int, int],
    runs: int,
) -> Scene:
    """Return the content of the picture, without the ranks that have no memory to draw.

    Args:
        above, below: memory of each rank of the source, and of each rank of the destination.
        ribbons: bands to draw between the memory of the ranks.
        names: names of the drawn layers.
        of_layers: number of layers of the group on the drawn ranks.
        blocks: number of drawn blocks at the source, and at the destination.
        runs: number of copied ranges of bytes between the drawn blocks.
    """
    src = [number for number, lane in enumerate(above) if lane.strips]
    dst = [number for number, lane in enumerate(below) if lane.strips]
    return Scene(
        src=tuple(above[number] for number in src),
        dst=tuple(below[number] for number in dst),
        ribbons=tuple(Ribbon(src.index(r.src), dst.index(r.dst), r.run) for r in ribbons),
        layers=tuple(names),
        of_layers=of_layers,
        src_blocks=blocks[0],
        dst_blocks=blocks[1],
        runs=runs,
        joined=any(ribbon.run.pieces > 1 for ribbon in ribbons),
    )


def _blocks(route: Route) -> tuple[int, int]:
    """Return the number of blocks to draw at the source, and at the destination.

    On the side with larger blocks, one block is drawn. On the other side, as many whole blocks are drawn as
    fit into that block.

    Args:
        route: layers to draw, which are copied together between two ranks.
    """
    if route.cell_tokens == 0:
        return 1, 1
    return max(route.dst_cells // route.src_cells, 1), max(route.src_cells // route.dst_cells, 1)


def _names(ranks: Sequence[RankGeometry], group: int) -> Iterator[str]:
    """Yield the names of the layers that a KV cache group has on any of the given ranks, each name once.

    Args:
        ranks: memory geometry of the ranks.
        group: index of the group.
    """
    yield from dict.fromkeys(layer.name for rank in ranks for layer in rank.groups[group].layers)


def _sides(
    srcs: Sequence[RankGeometry],
    dsts: Sequence[RankGeometry],
    groups: tuple[int, int],
    names: Sequence[str],
    blocks: tuple[int, int],
) -> tuple[list[MemoryLane], list[MemoryLane]]:
    """Return the memory to draw for each rank of the source, and for each rank of the destination.

    Args:
        srcs, dsts: drawn ranks of the source and of the destination.
        groups: index of the KV cache group at the source, and at the destination.
        names: names of the drawn layers.
        blocks: number of drawn blocks at the source, and at the destination.
    """
    above = [_lane("source", rank, groups[0], names, blocks[0]) for rank in srcs]
    return above, [_lane("destination", rank, groups[1], names, blocks[1]) for rank in dsts]


def _lane(side: str, rank: RankGeometry, group: int, names: Sequence[str], blocks: int) -> MemoryLane:
    own = rank.groups[group]
    numbers = [number for number, layer in enumerate(own.layers) if layer.name in names]
    return MemoryLane(f"{side}, {rank_label(rank)}", tuple(strips(own, numbers, blocks)))
