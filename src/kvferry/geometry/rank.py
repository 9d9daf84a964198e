"""The KV cache memory of one worker.

A worker sends its `RankGeometry` to other engines in the handshake, and transfers are planned from the
geometries of both sides. A `PageMap` has the strides of pages in memory with one of the `LAYOUTS`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Protocol

from kvferry.common.errors import GeometryError
from kvferry.geometry.page import TOKEN, Field, PageFormat

# Orders of the axes in memory, outermost first, as in vLLM's enum. LBNHC is also called NHD, and LBHNC is
# also called HND. Layouts with B outermost are cross-layer layouts: all layers of a block are neighbours.
LAYOUTS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

# Order of the axes in `PageMap.counts` and `PageMap.strides`.
AXES = "LBHNC"


class GroupKind(StrEnum):
    """The kind of attention or state of a KV cache group. It decides which earlier tokens the group needs."""

    FULL = "full_attention"
    SLIDING = "sliding_window"
    CHUNKED = "chunked_local"
    MLA = "mla"
    STATE = "state"


class GroupPattern(Protocol):
    """The attention pattern of a KV cache group."""

    @property
    def kind(self) -> GroupKind: ...

    @property
    def attention_span(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Attention:
    """How far back layers attend.

    `attention_span` is the window in tokens for SLIDING, the attention chunk for CHUNKED, 0 otherwise.
    """

    kind: GroupKind
    attention_span: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that is registered with the transport: "DRAM", or "VRAM" of the GPU with index `device`."""

    address: int
    length: int
    memory: str = "DRAM"
    device: int = 0


@dataclass(frozen=True, slots=True)
class Scale:
    """Quantisation scales of the K or V of one layer, which are not stored in the KV cache itself.

    `source` is ``k`` (also for MLA latents) or ``v``. One factor is for all heads; else one per head of this
    rank.
    """

    # Under another scale the same quantised value stands for another number, so engines compare scales first.
    source: str
    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """The pages of one layer on one rank."""

    name: str
    address: int  # of the page of block 0
    block_stride: int  # bytes from one block's page to the next
    page: PageFormat
    scales: tuple[Scale, ...] = ()  # those other than 1
    draft: str = ""  # digest of the draft model that the layer belongs to; empty for the model's own layers

    @property
    def identity(self) -> str:
        """Name that is unique among the layers of the model and of all draft models."""
        return f"{self.name} of draft {self.draft}" if self.draft else self.name


@dataclass(frozen=True, slots=True)
class Group:
    """A KV cache group. `layers` are those on this rank; none on some pipeline ranks."""

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
                f"group {self.kind}: an attention span of {self.attention_span} tokens; expected 1 or more "
                "for sliding and chunked attention, 0 for others"
            )

    @property
    def label(self) -> str:
        return group_label(self)


def group_label(group: GroupPattern) -> str:
    """Return the name of a KV cache group for messages and metrics, e.g. ``sliding_window(64)``."""
    return f"{group.kind}({group.attention_span})" if group.attention_span else str(group.kind)


@dataclass(frozen=True, slots=True)
class RankGeometry:
    """The KV cache memory of one worker.

    Block 0 of `num_blocks` is the null block, which is never transferred. Groups are in the engine's order;
    all ranks of an engine have the same number of groups. The tensor-parallel ranks are those of a pipeline
    stage, also if context parallelism adds some.
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
        return [f"{number} {group.label}" for number, group in enumerate(self.groups)]

    def check(self) -> None:
        """Raise GeometryError unless pages lie in registered regions, without an overlap in a layer."""
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
        # A peer's geometry is checked too: with an address outside of the regions, a transfer would fail or
        # read unrelated memory.
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
    """Registered regions of memory, sorted by address so that a lookup among thousands of them is fast."""

    def __init__(self, regions: Sequence[Region]) -> None:
        ordered = sorted((region.address, region.address + region.length) for region in regions)
        self._starts = [start for start, _ in ordered]
        self._farthest = list(accumulate((stop for _, stop in ordered), max))

    def holds(self, start: int, stop: int) -> bool:
        before = bisect_right(self._starts, start)
        return before > 0 and stop <= self._farthest[before - 1]


def _overlaps(field: Field, blocks: int, block_stride: int) -> bool:
    """Return True if two elements of a field may share a byte. An overlap is never missed."""
    # No elements overlap if each stride is at least as long as the memory that all shorter strides cover.
    loops = [(blocks, block_stride), *(loop for axis in field.axes for loop in axis.loops)]
    extent = field.item_bytes
    for stride, count in sorted((abs(stride), count) for count, stride in loops if count > 1):
        if stride < extent:
            return True
        extent += (count - 1) * stride
    return False


def is_compact(layout: str) -> bool:
    """Return True if pages are contiguous: layer and block are the two outermost axes."""
    return set(layout[:2]) == {"L", "B"}


@dataclass(frozen=True, slots=True)
class PageMap:
    """The memory of one group's pages on one rank, as an address and strides.

    Example: two layers of two heads, three blocks of four tokens, 8 bytes per head and token. Blocks are the
    outermost axis.

    >>> memory = page_map("BLHNC", address=4096, counts=(2, 3, 2, 4, 8))
    >>> memory.strides
    (64, 128, 32, 8, 1)
    >>> memory.page(1, 2) - 4096
    320
    """

    address: int  # of the first byte of layer 0, block 0
    counts: tuple[int, int, int, int, int]  # layers, kernel blocks, heads, tokens, bytes of content
    strides: tuple[int, int, int, int, int]  # bytes between neighbours along each of these axes
    kernels: int = 1  # consecutive kernel blocks per block

    @property
    def block_stride(self) -> int:
        """Bytes from a page to the next block's page in the same layer."""
        return self.strides[1] * self.kernels

    def page(self, layer: int, block: int) -> int:
        return self.address + layer * self.strides[0] + block * self.block_stride


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """The space that a block pool reserves for the pages of a group. It may exceed the size of the pages."""

    slots: int = 0  # least number per block, each with space for one layer's page
    slot_bytes: int = 0  # per kernel block, in layouts with contiguous pages; 0 for the size of the KV
    block_stride: int = 0  # bytes between blocks, in layouts with blocks outermost; 0 for side by side


def page_map(
    layout: str,
    address: int,
    counts: tuple[int, int, int, int, int],
    kernels: int = 1,
    room: PoolRoom = PoolRoom(),
) -> PageMap:
    """Return the addresses and strides of a group's pages in memory with one of the `LAYOUTS`."""
    if layout not in LAYOUTS:
        raise GeometryError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    sizes = dict(zip(AXES, (max(room.slots, counts[0]), *counts[1:]), strict=True))
    strides = {}
    stride = 1
    for depth in reversed(range(len(layout))):
        if depth == 1 and is_compact(layout):
            stride = max(stride, room.slot_bytes)
        if depth == 0 and layout[0] == "B" and room.block_stride:
            stride = room.block_stride
        strides[layout[depth]] = stride
        stride *= sizes[layout[depth]]
    layer, block, head, token, content = (strides[axis] for axis in AXES)
    return PageMap(address, counts, (layer, block, head, token, content), kernels)
