"""Format of a page whose content is unknown, from the shape and strides of its tensor."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.geometry.page import PageFormat, opaque_page


def whole_page(
    content: str,
    block_tokens: int,
    extents: Sequence[int],
    strides: Sequence[int],
    *,
    item_bytes: int,
    rank: int,
    ranks: int,
) -> PageFormat:
    """Return the format of a page that can only move whole, to a page of the same shape and strides.

    The content id contains shape and strides, so that engines notice a difference.

    >>> page = whole_page("CODES", 16, (1, 2, 16, 8), (4096, 2048, 128, 4), item_bytes=4, rank=0, ranks=1)
    >>> page.content, page.fields[0].item_bytes
    ('CODES (2, 16, 8) at strides of 2048, 128, 4 bytes', 32)

    Args:
        content: text that identifies the meaning of the bytes, such as backend and KV cache dtype.
        block_tokens: number of tokens per block; 0 for a snapshot or a ring.
        extents: number of kernel blocks per block, head slots, tokens and elements.
        strides: bytes between neighbours along each of these axes.
        item_bytes: bytes of an element.
        rank: index of this rank, from 0 to `ranks` - 1; 0 if all ranks hold the same bytes.
        ranks: number of ranks that hold different bytes; 1 if all ranks hold the same bytes.
    """
    run, loops = _runs(extents, strides, item_bytes)
    shape, apart = tuple(extents[1:]), ", ".join(map(str, strides[1:]))
    return opaque_page(
        f"{content} {shape} at strides of {apart} bytes", block_tokens, run, rank, ranks, loops
    )


def _runs(
    extents: Sequence[int], strides: Sequence[int], item_bytes: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the contiguous byte ranges (runs) that a page occupies. All of them have the same length.

    Returns:
        Number of bytes per run, and (count, stride in bytes) of each loop over the runs, outermost loop
        first. There are no loops if the page is contiguous.
    """
    run, loops = item_bytes, list[tuple[int, int]]()
    for stride, count in sorted(zip(strides, extents, strict=True)):
        if count == 1:
            continue
        if not loops and stride == run:
            run *= count
        else:
            loops.insert(0, (count, stride))
    return run, tuple(loops)
