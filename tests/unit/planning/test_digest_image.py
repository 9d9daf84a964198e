"""Both sides of any two engines digest the same bytes in the same order, and all that was moved."""

from unittest import mock

import numpy as np
from hypothesis import event, given, strategies as st

from kvferry.planning import digest_image as module
from kvferry.planning.cell_copy import ONE_CELL, CellCopy, PoolCopies
from kvferry.planning.digest_image import digest_image
from kvferry.planning.select import Cells, select_cells
from kvferry.planning.strided_copy import Loop, StridedCopy
from kvferry.planning.template import Route, build_templates
from support.engines import ranks
from support.examples import examples
from support.oracle import Memory, copy, expand_cells, fill
from support.packed import runs, shifted
from support.strategies import UNLIKE, Transfer, transfers

PIECES = st.sampled_from((1, 7, 64, 1 << 17))


@examples(120)
@given(transfers(), PIECES, PIECES)
def test_both_sides_digest_every_moved_byte_once_and_in_the_same_order(
    transfer: Transfer, piece: int, long_run: int
):
    check(transfer, piece, long_run)


@examples(8)
@given(transfers(UNLIKE, tokens=1700, layers=2), PIECES)
def test_both_sides_digest_blocks_of_unrelated_sizes_in_the_same_order(transfer, piece):
    check(transfer, piece, piece)


def check(transfer: Transfer, piece: int, long_run: int) -> None:
    sources, destinations = ranks(transfer.src, transfer.families), ranks(transfer.dst, transfer.families)
    memories = [Memory.of(rank, seed) for seed, rank in enumerate(sources)]
    for rank, memory in zip(sources, memories, strict=True):
        fill(rank, transfer.src_tables, memory)
    for rank in destinations:
        there = Memory.of(rank, 1000)
        for memory, template in zip(memories, build_templates(sources, rank), strict=True):
            for route in template.routes:
                with (
                    mock.patch.object(module, "PIECE_BYTES", piece),
                    mock.patch.object(module, "LONG_RUN_BYTES", long_run),
                ):
                    image = digest_image(route)
                pieces = [nest for part in image.src for nest in part.nests]
                event("pieces" if len(pieces) > len(route.cell_copies) else "whole")
                cells = cells_of(transfer, route)
                moved = np.zeros(len(there.bytes), np.int64)
                copy(expand_cells(route, cells), memory, there, moved)
                of_src, _ = packed(
                    image.src, image.stride, memory, cells.src_block, cells.src_number, route.src_stride
                )
                of_dst, read = packed(
                    image.dst, image.stride, there, cells.dst_block, cells.dst_number, route.dst_stride
                )
                assert (of_src == of_dst).all()
                assert (read == moved).all(), "other bytes are digested than were moved"


def cells_of(transfer: Transfer, route: Route) -> Cells:
    at, group = route.dst_group, transfer.dst.groups[route.dst_group]
    tables = transfer.src_tables[route.src_group], transfer.dst_tables[at]
    return select_cells(route, group, transfer.spans[at], *tables)


def packed(
    parts: tuple[PoolCopies, ...],
    image_stride: int,
    memory: Memory,
    blocks: np.ndarray,
    cells: np.ndarray,
    stride: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the packed cells, and how often each byte of `memory` is in them."""
    images = Memory(0, np.zeros(len(blocks) * image_stride, np.uint8))
    writes, read = np.zeros(len(images.bytes), np.int64), np.zeros(len(memory.bytes), np.int64)
    numbers = Memory(memory.address, np.arange(len(memory.bytes)))
    for index, (block, number) in enumerate(zip(blocks.tolist(), cells.tolist(), strict=True)):
        for part in parts:
            start = block * stride + part.at[number % len(part.at)]
            descriptors = shifted(runs(part.nests), start, index * image_stride)
            copy(descriptors, memory, images, writes)
            for address, length in zip(descriptors.src, descriptors.length, strict=True):
                read[numbers.bytes[numbers.at(int(address), int(length))]] += 1
    assert writes.max(initial=0) <= 1, "two bytes of a cell have one place in its image"
    assert (np.sort(-writes.reshape(-1, image_stride)) == -writes.reshape(-1, image_stride)).all(), "a gap"
    return images.bytes, read


def test_a_piece_is_as_large_as_the_cache_allows_unless_its_runs_are_long():
    def pieces(*loops: Loop, run: int = 256) -> list[tuple[int, int]]:
        copies = (StridedCopy(0, 0, run, loops),)
        route = Route(
            src_group=0, dst_group=0, layers=("layers.0",), cell_tokens=1, src_cells=1, dst_cells=1,
            src_stride=1 << 30, dst_stride=1 << 30, src_blocks=2, dst_blocks=2,
            cell_copies=(CellCopy(ONE_CELL, ONE_CELL, copies),),
        )  # fmt: skip
        return [(nest.bytes, nest.run) for part in digest_image(route).src for nest in part.nests]

    long = module.LONG_RUN_BYTES
    assert pieces(Loop(1000, 512, 1024)) == [(512 * 256, 256), (488 * 256, 256)]
    assert (
        pieces(Loop(3, 1 << 20, 1 << 20), Loop(1000, 512, 1024)) == [(512 * 256, 256), (488 * 256, 256)] * 3
    )
    assert pieces(Loop(9, 2 * long, 3 * long), run=long) == [(9 * long, long)]
    assert pieces(run=5 * long) == [(5 * long, 5 * long)]
