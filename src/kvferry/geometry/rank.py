"""The memory of one worker's pages.

A `RankGeometry` describes one worker's KV cache once, at registration: its groups, and for every layer
the address of block 0, the stride between blocks and the `PageFormat`. It is plain data. The handshake sends
it to the other engine, and the planner plans every transfer from two of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from kvferry.errors import GeometryError
from kvferry.geometry.page import TOKEN, Field, PageFormat


class GroupKind(StrEnum):
    """The kind of a group, which decides the earlier tokens that a continuation needs."""

    FULL = "full_attention"
    SLIDING = "sliding_window"
    CHUNKED = "chunked_local"
    MLA = "mla"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Region:
    """Memory registered with the transport.

    Attributes:
        address: first byte.
        length: bytes.
        memory: "DRAM" or "VRAM".
        device: device index, 0 for host memory.
    """

    address: int
    length: int
    memory: str = "DRAM"
    device: int = 0


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors outside of the cache that multiply a layer's quantised codes.

    The factors are part of what the codes mean.

    Attributes:
        source: the quantised tensor, ``k`` (latents included) or ``v``.
        factors: one factor for all heads, or one per head on this rank.
    """

    source: str
    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """The pages of one layer on one rank.

    Attributes:
        name: the layer's name, the same on every rank and engine of a model.
        address: address of block 0's page.
        block_stride: bytes from one block's page to the next.
        page: format of a page.
        scales: scales of its quantised codes that are not 1 and are not stored in its pages.
        draft: digest of the draft model that the layer belongs to; empty for the model's own layers.
    """

    name: str
    address: int
    block_stride: int
    page: PageFormat
    scales: tuple[Scale, ...] = ()
    draft: str = ""

    @property
    def identity(self) -> str:
        """Name of the layer and its draft: two drafts may use the same layer name.

        >>> from kvferry.geometry import opaque_page
        >>> page = opaque_page("packed", 16, 16, 0, 1)
        >>> Layer("layers.32", 0, 16, page).identity, Layer("layers.32", 0, 16, page, draft="3fa9").identity
        ('layers.32', 'layers.32 of draft 3fa9')
        """
        return f"{self.name} of draft {self.draft}" if self.draft else self.name


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table.

    Attributes:
        kind: kind of its layers.
        block_tokens: tokens per (manager) block.
        attention_span: window in tokens for SLIDING, chunk in tokens for CHUNKED, 0 otherwise.
        layers: layers of the group on this rank; empty on a pipeline rank that has none.
    """

    kind: GroupKind
    block_tokens: int
    attention_span: int
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise GeometryError(
                f"group {self.kind}: blocks of {self.block_tokens} tokens; expected 1 or more"
            )
        if (self.kind in (GroupKind.SLIDING, GroupKind.CHUNKED)) != (self.attention_span > 0):
            raise GeometryError(
                f"group {self.kind}: an attention span of {self.attention_span} tokens; expected 1 or "
                "more for "
                "sliding and chunked attention, 0 for others"
            )

    @property
    def label(self) -> str:
        """Name for messages and metrics, e.g. ``sliding_window(64)``."""
        return group_label(self.kind, self.attention_span)


def group_label(kind: GroupKind, attention_span: int) -> str:
    """Return the name of a group for messages and metrics, e.g. ``sliding_window(64)``."""
    return f"{kind}({attention_span})" if attention_span else str(kind)


@dataclass(frozen=True, slots=True)
class RankGeometry:
    """The KV cache of one worker.

    Attributes:
        tp_rank, tp_size, pp_rank, pp_size: rank and number of ranks, tensor- and pipeline-parallel.
        num_blocks: number of blocks in the pool; block 0 is the null block and never moves.
        groups: groups in the engine's order; all ranks of an engine have the same number of groups.
        regions: registered memory; every page lies in one of them.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    num_blocks: int
    groups: tuple[Group, ...]
    regions: tuple[Region, ...]

    @property
    def labels(self) -> list[str]:
        """Return the labels of the groups with their numbers, for messages."""
        return [f"{number} {group.label}" for number, group in enumerate(self.groups)]

    def check(self) -> None:
        """Raise GeometryError if the geometry is inconsistent.

        Every page must lie in one registered region and overlap no other page of its layer, and all indices
        must be in range. Engines check their own geometry and that of a peer. An address outside of the
        regions would fail in the transport, or read other memory.
        """
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.pp_rank < self.pp_size):
            raise GeometryError(
                f"rank (pp, tp) is ({self.pp_rank}, {self.tp_rank}); expected below ({self.pp_size}, "
                f"{self.tp_size})"
            )
        if self.num_blocks < 1:
            raise GeometryError(f"a pool of {self.num_blocks} blocks; expected 1 or more")
        names = Counter(layer.name for group in self.groups for layer in group.layers)
        if twice := [name for name, times in names.items() if times > 1]:
            raise GeometryError(
                f"layers {twice} are described more than once; describe each layer in one group"
            )
        registered = _Registered(self.regions)
        for group in self.groups:
            for layer in group.layers:
                self._check_layer(group, layer, registered)

    def _check_layer(self, group: Group, layer: Layer, registered: _Registered) -> None:
        page = layer.page
        if page.block_tokens not in (0, group.block_tokens):
            raise GeometryError(
                f"layer {layer.name!r}: a page of {page.block_tokens} tokens; "
                f"expected {group.block_tokens}, as a block has"
            )
        if (page.block_tokens == 0) != (group.kind is GroupKind.STATE):
            raise GeometryError(
                f"layer {layer.name!r}: pages of {page.block_tokens} tokens in a group of kind {group.kind}; "
                "expected 0 for snapshots in a state group, and more in others"
            )
        if page.block_tokens == 0 and any(field.axis(TOKEN) for field in page.fields):
            raise GeometryError(f"layer {layer.name!r}: a snapshot has no token axis")
        for field in page.fields:
            if layer.block_stride < 1 or _overlaps(field, self.num_blocks, layer.block_stride):
                raise GeometryError(
                    f"layer {layer.name!r}: pages of {page.page_bytes} bytes every {layer.block_stride} "
                    f"overlap in field {field.name!r}"
                )
        stop = layer.address + (self.num_blocks - 1) * layer.block_stride + page.page_bytes
        if not registered.holds(layer.address, stop):
            raise GeometryError(f"layer {layer.name!r}: its pages reach outside the registered regions")


class _Registered:
    """Regions sorted by address, for the lookup of every layer among thousands of regions."""

    def __init__(self, regions: Sequence[Region]) -> None:
        ordered = sorted((region.address, region.address + region.length) for region in regions)
        self._starts = [start for start, _ in ordered]
        self._farthest = list(accumulate((stop for _, stop in ordered), max))

    def holds(self, start: int, stop: int) -> bool:
        """Return whether one region holds all bytes from `start` to `stop`."""
        before = bisect_right(self._starts, start)
        return before > 0 and stop <= self._farthest[before - 1]


def _overlaps(field: Field, blocks: int, block_stride: int) -> bool:
    """Return whether two elements of a field, in the same block or in two, share a byte.

    Elements do not overlap if each stride exceeds the extent of all loops with smaller strides.
    """
    loops = [(blocks, block_stride), *(loop for axis in field.axes for loop in axis.loops)]
    extent = field.item_bytes
    for stride, count in sorted((abs(stride), count) for count, stride in loops if count > 1):
        if stride < extent:
            return True
        extent += (count - 1) * stride
    return False
