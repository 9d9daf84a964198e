"""Descriptions of KV cache memory: what a page holds, where pages lie, which slice a rank has.

Everything here is a frozen value. `page` says what the bytes of one page mean (fields with named
axes), `rank` says where the pages of one worker lie. Both are what `planning` computes with.
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
