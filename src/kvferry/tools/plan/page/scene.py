"""The content of a picture of one group, for all of its layers or for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.geometry import RankGeometry
from kvferry.planning import Route
from kvferry.tools.plan.page.draw import MemoryLane, Ribbon, by_strip, cut, runs_of, strips
from kvferry.tools.plan.setting import PlannedTransfer

# Maximum number of drawn ranks per side.
MAX_RANKS = 4
# Layers are left out of a picture of several if there are more strips.
MAX_STRIPS = 1200
# If there are more runs, those between the same two strips are joined.
MAX_RIBBONS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The content of a picture that shows how blocks of a group are copied between two engines."""

    src: tuple[MemoryLane, ...]
    dst: tuple[MemoryLane, ...]
    ribbons: tuple[Ribbon, ...]
    layers: tuple[str, ...]
    of_layers: int  # number of layers of the group on the drawn ranks
    src_blocks: int
    dst_blocks: int
    runs: int
    joined: bool  # True if some ribbon stands for several runs


def scene(setting: PlannedTransfer, group: int, *, one_layer: bool) -> Scene | None:
    """Return the content of the picture that shows the copies of one group, by its index at the destination.

    None if no layer of the group is copied between the drawn ranks.

    Args:
        one_layer: False to draw all layers, with one band per pair of strips. True to draw only the first
            layer, with one band per run if there are not too many.
    """
    srcs, dsts = setting.src.ranks[:MAX_RANKS], setting.dst.ranks[:MAX_RANKS]
    routes = [
        (src, dst, route)
        for dst in range(len(dsts))
        for src, template in enumerate(setting.templates(dst)[:MAX_RANKS])
        for route in template.routes
        if route.dst_group == group
    ]
    if not routes:
        return None
    # Groups of the two engines may contain different layers. Drawn are those that share a table on both
    # sides.
    src_group = routes[0][2].src_group
    routes = [each for each in routes if each[2].src_group == src_group]
    blocks = _blocks(routes[0][2])
    shared = {layer.name for rank in srcs for layer in rank.groups[src_group].layers}
    here = dict.fromkeys(layer.name for rank in dsts for layer in rank.groups[group].layers)
    every = [name for name in here if name in shared]
    names = every[:1] if one_layer else every
    while True:
        above = [_lane("source", rank, src_group, names, blocks[0]) for rank in srcs]
        below = [_lane("destination", rank, group, names, blocks[1]) for rank in dsts]
        if len(names) == 1 or sum(len(lane.strips) for lane in (*above, *below)) <= MAX_STRIPS:
            break
        names = names[: len(names) // 2]
    parts = [
        (src, dst, [list(cut(run, above[src].strips, below[dst].strips)) for run in runs_of(route, *blocks)])
        for src, dst, route in routes
    ]
    runs = sum(bool(run) for _, _, of in parts for run in of)
    joined = not one_layer or runs > MAX_RIBBONS
    # Ranks that have no memory to draw are left out.
    lanes = [[number for number, lane in enumerate(side) if lane.strips] for side in (above, below)]
    ribbons = []
    for src, dst, of in parts:
        each = [part for run in of for part in run]
        drawn = by_strip(each) if joined else [part for _, _, part in each]
        ribbons += [Ribbon(lanes[0].index(src), lanes[1].index(dst), run) for run in drawn]
    return Scene(
        src=tuple(above[number] for number in lanes[0]),
        dst=tuple(below[number] for number in lanes[1]),
        ribbons=tuple(ribbons),
        layers=tuple(names),
        of_layers=len(every),
        src_blocks=blocks[0],
        dst_blocks=blocks[1],
        runs=runs,
        joined=any(ribbon.run.pieces > 1 for ribbon in ribbons),
    )


def _blocks(route: Route) -> tuple[int, int]:
    """Return the number of blocks to draw on each side: one of the larger, and those that fit into it."""
    if route.cell_tokens == 0:
        return 1, 1
    return max(route.dst_cells // route.src_cells, 1), max(route.src_cells // route.dst_cells, 1)


def _lane(side: str, rank: RankGeometry, group: int, names: Sequence[str], blocks: int) -> MemoryLane:
    own = rank.groups[group]
    numbers = [number for number, layer in enumerate(own.layers) if layer.name in names]
    stage = f"PP rank {rank.pp_rank} of {rank.pp_size}, " if rank.pp_size > 1 else ""
    label = f"{side}, {stage}TP rank {rank.tp_rank} of {rank.tp_size}"
    return MemoryLane(label, tuple(strips(own, numbers, blocks)))
