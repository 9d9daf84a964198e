"""Descriptions of KV cache memory: the content of pages, their addresses, and the part that each rank holds.

All classes here are frozen dataclasses. `page` describes the bytes of one page as fields with named axes.
`rank` describes where the pages of one worker lie in memory. `planning` computes transfers from both.
"""

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
    "TOKEN",
    "Attention",
    "Axis",
    "Field",
    "Group",
    "GroupKind",
    "GroupPattern",
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
