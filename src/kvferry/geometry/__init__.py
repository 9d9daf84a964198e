"""Descriptions of KV cache memory, as frozen dataclasses, from which `planning` computes transfers.

`page` describes the bytes of one page as fields with named axes, `interleave` the tokens of a block that it
holds, and `rank` where a worker's pages lie.
"""

from kvferry.geometry.interleave import NOT_INTERLEAVED, Interleave
from kvferry.geometry.page import (
    TOKEN,
    Axis,
    Field,
    PageFormat,
    join_loops,
    loop_offsets,
    opaque_page,
    whole_page,
)
from kvferry.geometry.rank import (
    LAYOUTS,
    Attention,
    Group,
    GroupKind,
    GroupPattern,
    Layer,
    PageMap,
    PoolRoom,
    RankGeometry,
    Region,
    Scale,
    is_compact,
    page_map,
)

__all__ = [
    "LAYOUTS",
    "NOT_INTERLEAVED",
    "TOKEN",
    "Attention",
    "Axis",
    "Field",
    "Group",
    "GroupKind",
    "GroupPattern",
    "Interleave",
    "Layer",
    "PageFormat",
    "PageMap",
    "PoolRoom",
    "RankGeometry",
    "Region",
    "Scale",
    "is_compact",
    "join_loops",
    "loop_offsets",
    "opaque_page",
    "page_map",
    "whole_page",
]
