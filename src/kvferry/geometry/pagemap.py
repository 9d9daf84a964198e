"""The memory of one group's pages as five strides, for code that uses raw pointers.

A `RankGeometry` describes the same memory field by field. This module uses the axes of attention kernels and
engines: L (layer), B (block), H (head), N (token in block), C (content byte), in some order.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import GeometryError

LAYOUTS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Orders of the axes in memory, outermost first, as in vLLM's enum. LBNHC is also called NHD, LBHNC HND;
those with B outermost are cross-layer."""

AXES = "LBHNC"


def is_compact(layout: str) -> bool:
    """Return whether a page is contiguous, with only L and B outside of it."""
    return set(layout[:2]) == {"L", "B"}


@dataclass(frozen=True, slots=True)
class PageMap:
    """The memory of one group's pages on one rank, as an address and strides.

    Two layers of two heads, three blocks of four tokens, 8 bytes per head and token, block outermost:

    >>> memory = page_map("BLHNC", address=4096, counts=(2, 3, 2, 4, 8))
    >>> memory.strides
    (64, 128, 32, 8, 1)
    >>> memory.page(1, 2) - 4096
    320
    >>> memory.at(1, 2, head=1, token=3) - 4096
    376

    Attributes:
        address: address of the first byte of layer 0, block 0.
        counts: layers, blocks, heads, tokens, content bytes. Blocks are kernel blocks if a block is made of
            several. A snapshot has (.., .., 1, 1, bytes).
        strides: bytes between neighbours along each axis.
        kernels: kernel blocks per block; block ``b`` is kernel blocks ``[b·kernels, (b+1)·kernels)``.
    """

    address: int
    counts: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int, int]
    kernels: int = 1

    @property
    def layer_stride(self) -> int:
        """Bytes from a page to the same block's page in the next layer."""
        return self.strides[0]

    @property
    def block_stride(self) -> int:
        """Bytes from a page to the next block's page in the same layer."""
        return self.strides[1] * self.kernels

    def page(self, layer: int, block: int) -> int:
        """Return the address of a page: `layer` counts the group's layers, `block` whole blocks."""
        return self.address + layer * self.layer_stride + block * self.block_stride

    def at(self, layer: int, block: int, head: int, token: int) -> int:
        """Return the address of the content of one head and token; `token` counts inside the whole block."""
        kernel, token = divmod(token, self.counts[3])
        return (
            self.page(layer, block)
            + kernel * self.strides[1]
            + head * self.strides[2]
            + token * self.strides[3]
        )


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """The space that a pool has for a group's pages, if it exceeds what they need.

    Attributes:
        slots: slots of a block, if there are more than the group's layers.
        slot_bytes: bytes of a (kernel) block in a slot, if a page is contiguous.
        block_stride: bytes from a block to the next, if blocks are outermost.
    """

    slots: int = 0
    slot_bytes: int = 0
    block_stride: int = 0


def page_map(
    layout: str,
    address: int,
    counts: tuple[int, int, int, int, int],
    kernels: int = 1,
    room: PoolRoom = PoolRoom(),
) -> PageMap:
    """Return the page map of a layout.

    Args:
        layout: one of `LAYOUTS`.
        address: address of the first byte of layer 0, block 0.
        counts: layers, (kernel) blocks, heads, tokens, content bytes.
        kernels: kernel blocks per block.
        room: the pool's space for the group's pages.

    Raises:
        GeometryError: there is no such layout.
    """
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
