"""The memory of one group's pages as five strides, for code that uses raw pointers.

The axes are those of attention kernels: L (layer), B (block), H (head), N (token in block) and C (byte of
content of one head and token).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import GeometryError

# Orders of the axes in memory, outermost first, as in vLLM's enum. LBNHC is also called NHD, and LBHNC is
# also called HND. Layouts with B outermost are cross-layer layouts: all layers of a block are neighbours.
LAYOUTS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

# Order of the axes in `PageMap.counts` and `PageMap.strides`.
AXES = "LBHNC"


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
    >>> memory.at(1, 2, head=1, token=3) - 4096
    376

    Attributes:
        address: address of the first byte of layer 0, block 0.
        counts: number of layers, kernel blocks, heads, tokens and content bytes. A group of recurrent state
            has one head and one token, and the content is the whole snapshot.
        strides: bytes between neighbours along each of these five axes.
        kernels: number of kernel blocks per block. Block ``b`` consists of the kernel blocks ``[b·kernels,
            (b+1)·kernels)``.
    """

    address: int
    counts: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int, int]
    kernels: int = 1

    @property
    def layer_stride(self) -> int:
        return self.strides[0]

    @property
    def block_stride(self) -> int:
        """Bytes from a page to the next block's page in the same layer."""
        return self.strides[1] * self.kernels

    def page(self, layer: int, block: int) -> int:
        """Return the address of a page, by index of the layer in the group and block id."""
        return self.address + layer * self.layer_stride + block * self.block_stride

    def at(self, layer: int, block: int, head: int, token: int) -> int:
        """Return the address of the KV of one head and token.

        Args:
            layer: index of the layer in the group.
            head: index of the head on this rank.
            token: index of the token in the block.
        """
        kernel, token = divmod(token, self.counts[3])
        return (
            self.page(layer, block)
            + kernel * self.strides[1]
            + head * self.strides[2]
            + token * self.strides[3]
        )


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """The space that a block pool reserves for the pages of a group. It may exceed the size of the pages.

    A *slot* is the space for one layer's page.

    Attributes:
        slots: least number of slots per block; a block has as many as the group has layers, if those are
            more.
        slot_bytes: bytes that a slot reserves for one kernel block; 0 if it reserves only the size of the KV.
            Used only for layouts with contiguous pages.
        block_stride: bytes from one block to the next; 0 if the blocks lie side by side. Used only for
            layouts with blocks outermost.
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
    """Return the addresses and strides of a group's pages in memory with the given layout.

    Args:
        address, counts, kernels: as in `PageMap`.
        room: space that the pool reserves for the group's pages; by default exactly their size.

    Raises:
        GeometryError: `layout` is not one of `LAYOUTS`.
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
