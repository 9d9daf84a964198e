"""Descriptions of KV cache memory: the content of pages, their addresses, and the part that each rank holds.

All classes here are frozen dataclasses. `page` describes the bytes of one page as fields with named axes.
`rank` describes where the pages of one worker lie in memory. `planning` computes transfers from both.
"""

from kvferry.geometry.page import Axis, Field, PageFormat, opaque_page
from kvferry.geometry.rank import (
    Attention,
    Group,
    GroupKind,
    GroupPattern,
    Layer,
    RankGeometry,
    Region,
    Scale,
)

__all__ = [
    "Attention",
    "Axis",
    "Field",
    "Group",
    "GroupKind",
    "GroupPattern",
    "Layer",
    "PageFormat",
    "RankGeometry",
    "Region",
    "Scale",
    "opaque_page",
]
