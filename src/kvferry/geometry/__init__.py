"""Descriptions of KV cache memory: the content of pages, their addresses, and the slice of each rank.

Everything here is a frozen value. `page` describes the bytes of one page as fields with named axes. `rank`
describes the memory of one worker's pages. `planning` computes with both.
"""

from kvferry.geometry.page import Axis, Field, PageFormat, opaque_page
from kvferry.geometry.rank import Group, GroupKind, Layer, RankGeometry, Region, Scale

__all__ = [
    "Axis",
    "Field",
    "Group",
    "GroupKind",
    "Layer",
    "PageFormat",
    "RankGeometry",
    "Region",
    "Scale",
    "opaque_page",
]
