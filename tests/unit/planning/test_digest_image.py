"""Both sides of any two engines digest the same bytes at the same places, and all that was moved."""

import numpy as np
from hypothesis import given

from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.digest_image import digest_image
from kvferry.planning.select import Cells, select_cells
from kvferry.planning.template import Route, build_templates
from support.engines import ranks
from support.examples import examples
from support.oracle import Memory, copy, expand_cells, fill
from support.packed import runs, shifted
from support.strategies import UNLIKE, Transfer, transfers


@examples(120)
@given(transfers())
def test_both_sides_digest_every_moved_byte_once_and_at_the_same_place(transfer: Transfer):
    check(transfer)


@examples(8)
@given(transfers(UNLIKE, tokens=1700, layers=2))
def test_both_sides_digest_blocks_of_unrelated_sizes_at_the_same_places(transfer: Transfer):
    check(transfer)


def check(transfer: Transfer) -> None:
    sources, destinations = ranks(transfer.src, transfer.families), ranks(transfer.dst, transfer.families)
    memories = [Memory.of(rank, seed) for seed, rank in enumerate(sources)]
    for rank, memory in zip(sources, memories, strict=True):
        fill(rank, transfer.src_tables, memory)
    for rank in destinations:
        there = Memory.of(rank, 1000)
        for memory, template in zip(memories, build_templates(sources, rank), strict=True):
            for route in template.routes:
                image = digest_image(route)
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
    for nest in (nest for part in parts for nest in part.nests):
        places = np.concatenate([np.arange(a, a + nest.run) for a in nest.descriptors().dst])
        assert (np.sort(places) == nest.dst + np.arange(nest.bytes)).all(), "a copy leaves gaps"
    assert (np.sort(-writes.reshape(-1, image_stride)) == -writes.reshape(-1, image_stride)).all(), "a gap"
    return images.bytes, read
