"""Moving cells through images, run by run: what copies and READs do together, without either."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import event

from kvferry.planning.descriptors import Descriptors
from kvferry.planning.packed_image import PackedImage
from kvferry.planning.select import Cells
from kvferry.planning.strategy import Costs, Strategy, TransferMethod, transfer_methods
from kvferry.planning.strided_copy import StridedCopy
from kvferry.planning.template import Route
from support.oracle import Memory, copy


def move(
    route: Route, method: TransferMethod, cells: Cells, src: Memory, dst: Memory, writes: np.ndarray
) -> None:
    """Move cells the way `method` says; `writes` as of `copy`."""
    image = method.image
    assert image is not None
    packed = Memory(0, np.full(len(cells) * image.stride, 0xA5, np.uint8))
    ignored = np.zeros(len(packed.bytes), np.int64)
    reads = [(part.at, part.descriptors) for part in image.reads]
    copies = [(part.at, runs(part.nests)) for part in image.pool_copies]
    for_image = reads if method.strategy is Strategy.OVER_READ else copies
    from_image = reads
    if method.scatters is not None:
        from_image = [(part.at, runs(part.nests)) for part in method.scatters]
    for index, (number, at_dst) in enumerate(zip(cells.src_number, cells.dst_number, strict=True)):
        src_block = int(cells.src_block[index]) * route.src_stride
        dst_block = int(cells.dst_block[index]) * route.dst_stride
        at = index * image.stride
        for offsets, descriptors in for_image:
            copy(
                shifted(descriptors, src_block + offsets[number % route.src_cells], at), src, packed, ignored
            )
        for offsets, descriptors in from_image:
            copy(shifted(descriptors, at, dst_block + offsets[at_dst % route.dst_cells]), packed, dst, writes)
    assert ignored.max(initial=0) <= 1, "a byte of an image was written twice"


def way_of(route: Route, how: str, gap: int) -> TransferMethod:
    """A way of `how`: "over-read" with gaps of so many bytes, "staged", or "staged, landed"."""
    costs = Costs(read_descriptor_seconds=gap * 1e-9, read_byte_seconds=1e-9)
    for method in transfer_methods(route, costs, 1 << 30):
        wanted = Strategy.OVER_READ if how == "over-read" else Strategy.STAGED
        if method.strategy is wanted and (method.landing is not None) == how.endswith("landed"):
            event(how)
            return method
    raise AssertionError(f"no way that is {how}")


def runs(copies: Sequence[StridedCopy]) -> Descriptors:
    """Every run of some copies, each by itself."""
    parts = [each.descriptors() for each in copies]
    return Descriptors(
        *(np.concatenate([getattr(p, side) for p in parts]) for side in ("src", "dst", "length"))
    )


def shifted(descriptors: Descriptors, src: int, dst: int) -> Descriptors:
    """The same, further on."""
    return Descriptors(descriptors.src + src, descriptors.dst + dst, descriptors.length)


def check_image(image: PackedImage) -> None:
    """An image's loops and stretches stay inside of it, and nothing overlaps."""
    for part in image.reads:
        assert (np.diff(np.sort(part.descriptors.src)) > 0).all()
    assert image.bytes <= image.stride
