"""What small made-up models keep."""

from __future__ import annotations

from kvferry.geometry import GroupKind
from kvferry.geometry.rank import LAYOUTS, is_compact
from kvferry.tools.models.store import LayerCache, ModelCache, StoredField

COMPACT = tuple(name for name in LAYOUTS if is_compact(name))
"""Layouts in which pages of different size can share slots."""

SPLITS = [(name, kernels) for name in LAYOUTS for kernels in (1, 2) if kernels == 1 or name[0] == "L"]
"""Layouts, and kernel blocks that a block is made of in them."""


def model(*stores: LayerCache) -> ModelCache:
    return ModelCache("made up", stores)


def attention(
    heads: int = 4,
    k: int = 3,
    v: int = 3,
    item: int = 2,
    kind: GroupKind = GroupKind.FULL,
    attention_span: int = 0,
) -> LayerCache:
    """K and V of so many elements per head."""
    widths = {"k": k, "v": v}
    return LayerCache(
        kind, attention_span, tuple(StoredField(n, item, heads, (("content", w),)) for n, w in widths.items())
    )


def state(heads: int = 4, conv: int = 2) -> LayerCache:
    """A convolution's inputs in two bytes, a recurrent state in four."""
    ssm = StoredField("ssm", 4, heads, (("row", 2), ("column", 3)))
    return LayerCache(GroupKind.STATE, 0, (StoredField("conv.x", 2, conv, (("width", 3),)), ssm))
