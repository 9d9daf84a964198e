"""What is drawn of one group: lanes of both sides and the ribbons between them, of all layers or of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.geometry import RankGeometry
from kvferry.plan.forecast import Setting
from kvferry.plan.page.draw import Ribbon
from kvferry.plan.page.place import Lane
from kvferry.plan.page.runs import Run, by_strip, runs_of
from kvferry.plan.page.strips import rank_label, strips
from kvferry.planning.template import Route

MAX_RANKS = 4
"""Ranks of a side that are drawn."""
MAX_STRIPS = 1200
MAX_RIBBONS = 600


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture's content.

    Attributes:
        src, dst: lanes.
        ribbons: between them.
        layers: names of the layers that are drawn, of how many.
        of_layers: how many the group has on the ranks that are drawn.
        src_blocks, dst_blocks: blocks that are drawn.
        runs: contiguous runs among the ribbons.
        joined: whether ribbons stand for several runs each.
    """

    src: tuple[Lane, ...]
    dst: tuple[Lane, ...]
    ribbons: tuple[Ribbon, ...]
    layers: tuple[str, ...]
    of_layers: int
    src_blocks: int
    dst_blocks: int
    runs: int
    joined: bool


def scene(setting: Setting, group: int, *, one_layer: bool) -> Scene | None:
    """What is drawn of a group; None if the ranks that are drawn have none of its layers.

    Args:
        setting: engines and request.
        group: number of the group.
        one_layer: its first layer, run by run, in place of all of them, strip by strip.
    """
    srcs, dsts = setting.srcs[:MAX_RANKS], setting.dsts[:MAX_RANKS]
    routes = [
        (number, src, route)
        for number in range(len(dsts))
        for src, template in enumerate(setting.templates(number)[:MAX_RANKS])
        for route in template.routes
        if route.dst_group == group
    ]
    if not routes:
        return None
    src_blocks, dst_blocks = _blocks(routes[0][2])
    every = _names(dsts, group)
    names = every[:1] if one_layer else every
    while len(names) > 1 and _count(srcs, dsts, group, names, (src_blocks, dst_blocks)) > MAX_STRIPS:
        names = names[: len(names) // 2]
    above, below = (
        [_lane(rank, group, names, blocks) for rank in ranks]
        for ranks, blocks in ((srcs, src_blocks), (dsts, dst_blocks))
    )
    found: list[tuple[int, int, list[Run]]] = []
    for dst, src, route in routes:
        if above[src].strips and below[dst].strips:
            runs = [
                run for run in runs_of(route, dst_blocks, src_blocks)
                if _inside(run.dst, below[dst]) and _inside(run.src, above[src])
            ]  # fmt: skip
            found.append((src, dst, runs))
    total = sum(len(runs) for _, _, runs in found)
    joined = not one_layer or total > MAX_RIBBONS
    ribbons = [
        Ribbon(src, dst, run)
        for src, dst, runs in found
        for run in (by_strip(runs, above[src].strips, below[dst].strips) if joined else runs)
    ]
    return _without_empty(above, below, ribbons, names, len(every), (src_blocks, dst_blocks), total, joined)


def _without_empty(
    above: list[Lane], below: list[Lane], ribbons: list[Ribbon], names: list[str], of_layers: int,
    blocks: tuple[int, int], total: int, joined: bool,  # noqa: FBT001 - passed on
) -> Scene:  # fmt: skip
    """The scene, without lanes that have nothing to show."""
    src = [n for n, lane in enumerate(above) if lane.strips]
    dst = [n for n, lane in enumerate(below) if lane.strips]
    return Scene(
        tuple(above[n] for n in src),
        tuple(below[n] for n in dst),
        tuple(Ribbon(src.index(r.src), dst.index(r.dst), r.run) for r in ribbons),
        tuple(names),
        of_layers,
        *blocks,
        total,
        joined and any(r.run.pieces > 1 for r in ribbons),
    )


def _blocks(route: Route) -> tuple[int, int]:
    """Blocks of either side, so that the larger one is one block."""
    if route.cell_tokens == 0:
        return 1, 1
    return max(route.dst_cells // route.src_cells, 1), max(route.src_cells // route.dst_cells, 1)


def _names(ranks: Sequence[RankGeometry], group: int) -> list[str]:
    return list(dict.fromkeys(layer.name for rank in ranks for layer in rank.groups[group].layers))


def _lane(rank: RankGeometry, group: int, names: Sequence[str], blocks: int) -> Lane:
    own = rank.groups[group]
    numbers = [n for n, layer in enumerate(own.layers) if layer.name in names]
    return Lane(rank_label(rank), tuple(strips(own, numbers, blocks)))


def _count(
    srcs: Sequence[RankGeometry], dsts: Sequence[RankGeometry], group: int, names: Sequence[str],
    blocks: tuple[int, int],
) -> int:  # fmt: skip
    sides = zip((srcs, dsts), blocks, strict=True)
    return sum(len(_lane(rank, group, names, count).strips) for ranks, count in sides for rank in ranks)


def _inside(address: int, lane: Lane) -> bool:
    return any(strip.address <= address < strip.stop for strip in lane.strips)
