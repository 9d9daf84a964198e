"""Memory of an engine's cache tensors, compared with the memory that is registered for transfers.

An engine hands over one tensor per layer, whose pages are registered. The layer itself computes in tensors
that the engine has bound to it: a view of the handed tensor, or one view per recurrent state. If the two
differ, transfers succeed and answers are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.geometry.rank import RankGeometry

# (count, stride in bytes) of each axis.
Loops: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """Memory of a tensor whose first axis counts blocks. `axes` are the others, in the tensor's order.

    `storage` is the address and length in bytes of the allocation behind the tensor.
    """

    address: int
    blocks: int
    block_stride: int
    axes: Loops
    item_bytes: int
    storage: tuple[int, int]

    @property
    def loops(self) -> Loops:
        """Axes inside of a block, without those of extent 1, and with bytes in place of elements.

        So a view with another dtype, or with an axis of extent 1 more or less, has the same loops.

        >>> TensorMemory(0, 8, 8192, ((1, 8192), (16, 512), (32, 4)), 4, (0, 65536)).loops
        ((16, 512), (128, 1))
        """
        axes = [axis for axis in self.axes if axis[0] != 1]
        if axes and axes[-1][1] == self.item_bytes:
            return (*axes[:-1], (axes[-1][0] * self.item_bytes, 1))
        return (*axes, (self.item_bytes, 1))

    @property
    def block_bytes(self) -> int:
        return 1 + sum((count - 1) * stride for count, stride in self.loops)

    def __str__(self) -> str:
        axes = ", ".join(f"{count} every {stride}" for count, stride in self.axes)
        return (
            f"{self.blocks} blocks from {self.address:#x} every {self.block_stride} bytes "
            f"({axes} bytes in a block) in the {self.storage[1]} bytes at {self.storage[0]:#x}"
        )


# Memory that a layer computes in: one tensor, or a tensor for each of its recurrent states.
Computed: TypeAlias = TensorMemory | tuple[TensorMemory, ...]


def find_difference(handed: TensorMemory, computed: Computed) -> str:
    """Return how the memory that a layer computes in differs from the tensor handed over; empty if equal.

    A single tensor may split blocks into kernel blocks. Those of several states divide the pages, in order.
    """
    if isinstance(computed, TensorMemory):
        same = computed.address == handed.address and computed.storage == handed.storage
        alike = _blocks(handed) == _blocks(computed) and handed.loops == computed.loops
        if same and (alike or _splits_blocks_of(handed, computed)):
            return ""
        return f"the layer computes in {computed}; expected {handed}"
    if _divide(handed, computed):
        return ""
    return f"the layer computes in {' and '.join(map(str, computed)) or 'no tensor'}; expected {handed}"


def find_unregistered(geometry: RankGeometry, handed: Mapping[str, TensorMemory]) -> str:
    """Return how what is registered for transfers differs from the tensors handed over; empty if equal.

    A block may be several blocks of the tensor.
    """
    regions = {(region.address, region.length) for region in geometry.regions}
    for layer in (layer for group in geometry.groups for layer in group.layers):
        tensor = handed[layer.name]
        kernel_blocks, rest = divmod(tensor.blocks, geometry.num_blocks)
        pages = tensor.address, tensor.block_stride * kernel_blocks
        if rest or pages != (layer.address, layer.block_stride) or tensor.storage not in regions:
            return (
                f"layer {layer.name}: {geometry.num_blocks} pages from {layer.address:#x} every "
                f"{layer.block_stride} bytes are registered; expected {tensor}"
            )
    return ""


def _blocks(tensor: TensorMemory) -> tuple[int, int]:
    # The stride of a single block means nothing, and views of the same memory give different ones.
    return tensor.blocks, tensor.block_stride if tensor.blocks > 1 else 0


def _splits_blocks_of(handed: TensorMemory, computed: TensorMemory) -> bool:
    """Return True if each block of `handed` is a whole number of consecutive blocks of `computed`."""
    (whole, stride), *inner = handed.loops
    (part, part_stride), *inner_part = computed.loops
    if inner and handed.loops[1:] == computed.loops:
        part, part_stride, inner_part = 1, stride, inner
    # The first loops of the two may differ only in their count.
    if (part_stride, inner_part) != (stride, inner) or computed.block_stride != part * stride:
        return False
    if whole % part or whole == part:
        return False
    # Blocks of other layers may lie between those of `handed`, and `computed` may count them too.
    apart, rest = divmod(handed.block_stride, computed.block_stride)
    return not rest and computed.blocks >= (handed.blocks - 1) * apart + whole // part


def _divide(handed: TensorMemory, states: Sequence[TensorMemory]) -> bool:
    """Return True if the blocks of `states` lie one after the other in each block of `handed`."""
    if not states or states[0].address != handed.address:
        return False
    if any(_blocks(state) != _blocks(handed) or state.storage != handed.storage for state in states):
        return False
    ends = [state.address + state.block_bytes for state in states]
    starts = [*(state.address for state in states[1:]), handed.address + handed.block_bytes]
    return all(end <= start for end, start in zip(ends, starts, strict=True))
