"""Descriptions of KV cache memory: the content of pages, their addresses, and the part that each rank holds.

All classes here are frozen dataclasses. `page` describes the bytes of one page as fields with named axes.
`rank` describes where the pages of one worker lie in memory. `planning` computes transfers from both.
"""

from kvferry.geometry.interior import page_interior
from kvferry.geometry.layout import (
    EngineShape,
    GroupShape,
    group_layers,
    lay_out,
    lay_out_rank,
    layer_name,
    split_stages,
)
from kvferry.geometry.page import Axis, Field, PageFormat, join_loops, loop_offsets, opaque_page, whole_page
from kvferry.geometry.rank import (
    LAYOUTS,
    Attention,
    Group,
    GroupKind,
    GroupPattern,
    Layer,
    PageMap,
    RankGeometry,
    Region,
    Scale,
)
from kvferry.geometry.store import LayerCache, ModelCache, StoredField

__all__ = [
    "LAYOUTS",
    "Attention",
    "Axis",
    "EngineShape",
    "Field",
    "Group",
    "GroupKind",
    "GroupPattern",
    "GroupShape",
    "Layer",
    "LayerCache",
    "ModelCache",
    "PageFormat",
    "PageMap",
    "RankGeometry",
    "Region",
    "Scale",
    "StoredField",
    "group_layers",
    "join_loops",
    "lay_out",
    "lay_out_rank",
    "layer_name",
    "loop_offsets",
    "opaque_page",
    "page_interior",
    "split_stages",
    "whole_page",
]
