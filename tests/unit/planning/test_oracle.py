"""The planner against a brute-force mover, over any two engines that can be described, every way there is."""

import numpy as np
from hypothesis import event, given, strategies as st

from kvferry.geometry import RankGeometry
from kvferry.planning.descriptors import merge
from kvferry.planning.prepared_lists import PreparedEntries, TransferCounts, count_transfer
from kvferry.planning.select import Cells, select_cells, unfilled_cells
from kvferry.planning.template import Route, Template, build_templates
from support.engines import ranks
from support.examples import examples
from support.oracle import Memory, copy, expand_cells, expect, fill
from support.packed import move, way_of
from support.ready import source_of
from support.strategies import UNLIKE, Transfer, transfers

GAPS = st.sampled_from((0, 5, 64, 1 << 20))
"""Bytes that are read along; the widest joins a whole rank's memory into one stretch."""


@examples(160)
@given(transfers(), st.sampled_from(("direct", "over-read", "staged", "staged, landed")), GAPS)
def test_every_destination_byte_is_the_right_one_or_untouched(transfer: Transfer, how: str, gap: int):
    try:
        check_bytes(transfer, how, gap)
    except BaseException as error:
        error.add_note(f"\ndef test_this_case():\n    check_bytes({source_of(transfer)}, {how!r}, {gap})\n")
        raise


@examples(10)
@given(
    transfers(UNLIKE, tokens=1700, layers=2),
    st.sampled_from(("direct", "over-read", "staged", "staged, landed")),
    GAPS,
)
def test_blocks_of_unrelated_sizes_move_correctly(transfer, how, gap):
    try:
        check_bytes(transfer, how, gap)
    except BaseException as error:
        error.add_note(f"\ndef test_this_case():\n    check_bytes({source_of(transfer)}, {how!r}, {gap})\n")
        raise


def check_bytes(transfer: Transfer, how: str, gap: int) -> None:
    sources, destinations = engines(transfer)
    memories = [Memory.of(rank, seed) for seed, rank in enumerate(sources)]
    for rank, memory in zip(sources, memories, strict=True):
        rank.check()
        fill(rank, transfer.src_tables, memory)
    for rank in destinations:
        rank.check()
        memory = Memory.of(rank, 1000)
        expected = expect(
            rank, sources, transfer.spans, transfer.dst_tables, memory.bytes.copy(), cleared=True
        )
        writes = np.zeros(len(memory.bytes), np.int64)
        for source, template in enumerate(build_templates(sources, rank)):
            for route in template.routes:
                cells = cells_of(transfer, route)
                if how == "direct":
                    copy(expand_cells(route, cells), memories[source], memory, writes)
                else:
                    move(route, way_of(route, how, gap), cells, memories[source], memory, writes)
                # After some routes and before others: no route fills these cells.
                clear(transfer, route, memory)
        expected.check(memory.bytes)
        assert writes.max(initial=0) <= 1, "a byte was read from two places"
        event("moves something" if writes.any() else "moves nothing")


@examples(160)
@given(
    transfers(shared=True),
    st.sampled_from(("direct", "direct", "over-read", "staged", "staged, landed")),
    GAPS,
)
def test_ranks_that_share_the_tokens_of_a_block_move_correctly(transfer: Transfer, how: str, gap: int):
    try:
        check_bytes(transfer, how, gap)
    except BaseException as error:
        error.add_note(f"\ndef test_this_case():\n    check_bytes({source_of(transfer)}, {how!r}, {gap})\n")
        raise
    shares = [max(group.turns[0] for group in side.groups) for side in (transfer.src, transfer.dst)]
    event(f"ranks that share tokens: {shares[0]} to {shares[1]}")


@examples(40)
@given(
    st.one_of(
        transfers(),
        transfers(shared=True),
        transfers(st.sampled_from([(49, 1), (7, 7), (25, 1), (5, 5)]), tokens=60),
    )
)
def test_prepared_indices_and_counts_describe_the_same_descriptors(transfer: Transfer):
    for template in templates(transfer):
        src_list, dst_list, bases = prepared(template)
        for route, (src_base, dst_base) in zip(template.routes, bases, strict=True):
            cells = cells_of(transfer, route)
            expand_copies = expand_cells(route, cells)
            src = PreparedEntries(src_base, route.src_blocks, route.src_cells)
            dst = PreparedEntries(dst_base, route.dst_blocks, route.dst_cells)
            here, there = (
                each.of(len(route.runs), ids, numbers)
                for each, ids, numbers in (
                    (src, cells.src_block, cells.src_number),
                    (dst, cells.dst_block, cells.dst_number),
                )
            )
            assert (src_list[here] == np.stack([expand_copies.src, expand_copies.length], 1)).all()
            assert (dst_list[there] == np.stack([expand_copies.dst, expand_copies.length], 1)).all()
            assert count_transfer(route, cells) == counted_one_by_one(route, cells)


def engines(transfer: Transfer) -> tuple[list[RankGeometry], list[RankGeometry]]:
    return ranks(transfer.src, transfer.families), ranks(transfer.dst, transfer.families)


def templates(transfer: Transfer) -> list[Template]:
    sources, destinations = engines(transfer)
    return [template for rank in destinations for template in build_templates(sources, rank)]


def cells_of(transfer: Transfer, route: Route) -> Cells:
    group = transfer.dst.groups[route.dst_group]
    return select_cells(
        route, group, transfer.spans[route.dst_group],
        transfer.src_tables[route.src_group], transfer.dst_tables[route.dst_group],
    )  # fmt: skip


def clear(transfer: Transfer, route: Route, memory: Memory) -> None:
    group = transfer.dst.groups[route.dst_group]
    span, table = transfer.spans[route.dst_group], transfer.dst_tables[route.dst_group]
    blocks, cells = unfilled_cells(route, group, span, table)
    for part in route.cell_copies:
        starts = blocks * route.dst_stride + np.array(part.dst_offsets)[cells % route.dst_cells]
        for start in starts.tolist():
            for first, length in zip(part.descriptors.dst, part.descriptors.length, strict=True):
                memory.bytes[memory.at(int(first) + start, int(length))] = 0


def counted_one_by_one(route: Route, cells: Cells) -> TransferCounts:
    """A tally by spelling every descriptor out and merging, row by row."""
    merged, descriptors = [], expand_cells(route, cells)
    for row in range(0, len(descriptors), max(len(cells), 1)):
        part = slice(row, row + len(cells))
        merged += merge(
            descriptors.src[part], descriptors.dst[part], descriptors.length[part]
        ).length.tolist()
    return TransferCounts(sum(merged), len(descriptors), len(merged), max(merged, default=0))


def prepared(template: Template) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """(address, length) of every row in every cell of every block, and where each route begins."""
    src, dst = [np.zeros((7, 2), np.int64)], [np.zeros((3, 2), np.int64)]
    bases = []
    for route in template.routes:
        bases.append((sum(map(len, src)), sum(map(len, dst))))
        for cell_copy in route.cell_copies:
            rows = cell_copy.descriptors
            src.append(
                _every_cell(rows.src, rows.length, cell_copy.src_offsets, route.src_stride, route.src_blocks)
            )
            dst.append(
                _every_cell(rows.dst, rows.length, cell_copy.dst_offsets, route.dst_stride, route.dst_blocks)
            )
    return np.concatenate(src), np.concatenate(dst), bases


def _every_cell(
    first: np.ndarray, length: np.ndarray, at: tuple[int, ...], stride: int, blocks: int
) -> np.ndarray:
    rows = zip(first, length, strict=True)
    entries = [(a + cell + b * stride, n) for a, n in rows for cell in at for b in range(blocks)]
    return np.array(entries, np.int64).reshape(-1, 2)
