"""Memory of a hypothetical engine, with pages as kvferry's connector describes them."""

from __future__ import annotations

from dataclasses import replace

from kvferry.geometry import Layer, PageFormat, RankGeometry
from kvferry.geometry.layout import EngineShape, lay_out, lay_out_rank, layer_name
from kvferry.geometry.models import ModelReading
from kvferry.geometry.page import whole_page
from kvferry.geometry.pagemap import PageMap
from kvferry.geometry.store import LayerCache
from kvferry.tools.plan.backends import BackendPages
from kvferry.tools.plan.contents import layer_pages
from kvferry.tools.plan.side import EngineSide, shape


def lay_out_engine(reading: ModelReading, side: EngineSide, num_blocks: int) -> tuple[RankGeometry, ...]:
    """Return the geometry of every rank of an engine.

    Raises:
        KVFerryError: an engine cannot have these settings.
    """
    engine = shape(reading, side, num_blocks)
    changed = {
        layer_name(number): (pages, cache)
        for number, (pages, cache) in enumerate(
            zip(layer_pages(reading, side), reading.cache.layers, strict=True)
        )
        if pages is not None and (pages.why_whole or _renamed(pages))
    }
    ranks = lay_out(reading.cache, engine)
    if not changed:
        return ranks
    return tuple(_described(reading, engine, number, rank, changed) for number, rank in enumerate(ranks))


def _renamed(pages: BackendPages) -> dict[str, str]:
    """Return the fields whose name says that the backend stores another element type, by their usual name."""
    return {name.partition(" in ")[0]: name for name in pages.fields if " in " in name}


def _described(
    reading: ModelReading,
    engine: EngineShape,
    number: int,
    rank: RankGeometry,
    changed: dict[str, tuple[BackendPages, LayerCache]],
) -> RankGeometry:
    maps = lay_out_rank(reading.cache, engine, number, rank.regions[0].address).maps
    groups = []
    for group, where in zip(rank.groups, maps, strict=True):
        layers = tuple(
            replace(layer, page=_page(layer, where, rank, *changed[layer.name]))
            if layer.name in changed
            else layer
            for layer in group.layers
        )
        groups.append(replace(group, layers=layers))
    return replace(rank, groups=tuple(groups))


def _page(
    layer: Layer, where: PageMap, rank: RankGeometry, pages: BackendPages, cache: LayerCache
) -> PageFormat:
    page = layer.page
    if not pages.why_whole:
        names = _renamed(pages)
        fields = tuple(replace(field, name=names.get(field.name, field.name)) for field in page.fields)
        return replace(page, fields=fields)
    ranks = rank.tp_size if any(field.heads for field in cache.fields) else 1
    kept = " ".join(f"{field.name}:{field.item_bytes}" for field in cache.fields)
    return whole_page(
        f"{pages.backend} {kept}",
        page.block_tokens,
        (where.kernels, *where.counts[2:]),
        where.strides[1:],
        item_bytes=1,
        rank=rank.tp_rank if ranks > 1 else 0,
        ranks=ranks,
    )
