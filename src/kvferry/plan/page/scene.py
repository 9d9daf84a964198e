"""The picture of one group: lanes of both sides and the ribbons between them, for all layers or for one."""

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
"""Maximum number of ranks that are drawn per side."""
MAX_STRIPS = 1200
MAX_RIBBONS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The content of a picture.

    Attributes:
        src, dst: lanes of both sides, none of them empty.
        ribbons: runs between the lanes.
        layers: names of the layers that are drawn.
        of_layers: number of the group's layers on the ranks that are drawn.
        src_blocks, dst_blocks: number of blocks that are drawn.
        runs: number of runs between them.
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
    """Return the picture of a group; None if the ranks that are drawn have none of its layers.

    If the source groups layers differently, the picture has those that share a block table on both sides.

    Args:
        setting: engines and request.
        group: number of the group at the destination.
        one_layer: True to draw the first layer run by run, False to draw all layers strip by strip.
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
    """Return the scene without empty lanes."""
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
    """Return the blocks to draw of source and destination; the side with larger blocks has one."""
    if route.cell_tokens == 0:
        return 1, 1
    return max(route.dst_cells // route.src_cells, 1), max(route.src_cells // route.dst_cells, 1)


def _names(ranks: Sequence[RankGeometry], group: int) -> Iterator[str]:
    """Yield the names of a group's layers on these ranks, each once."""
    yield from dict.fromkeys(layer.name for rank in ranks for layer in rank.groups[group].layers)


def _sides(
    srcs: Sequence[RankGeometry],
    dsts: Sequence[RankGeometry],
    groups: tuple[int, int],
    names: Sequence[str],
    blocks: tuple[int, int],
) -> tuple[list[MemoryLane], list[MemoryLane]]:
    """Return the source's and the destination's lanes for the layers in `names`."""
    above = [_lane("source", rank, groups[0], names, blocks[0]) for rank in srcs]
    return above, [_lane("destination", rank, groups[1], names, blocks[1]) for rank in dsts]


def _lane(side: str, rank: RankGeometry, group: int, names: Sequence[str], blocks: int) -> MemoryLane:
    own = rank.groups[group]
    numbers = [number for number, layer in enumerate(own.layers) if layer.name in names]
    return MemoryLane(f"{side}, {rank_label(rank)}", tuple(strips(own, numbers, blocks)))
