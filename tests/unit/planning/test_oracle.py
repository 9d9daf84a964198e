"""The planner against a brute-force mover, over any two engines that can be described, every way there is."""

import numpy as np
from hypothesis import event, given, settings, strategies as st

from kvferry.geometry import RankGeometry
from kvferry.planning.pieces import merge
from kvferry.planning.request import Tally, as_addresses, as_indices, tally
from kvferry.planning.select import Cells, select_cells
from kvferry.planning.template import Route, Template, build_templates
from support.engines import ranks
from support.oracle import Memory, copy, expect, fill
from support.packed import move, way_of
from support.ready import source_of
from support.strategies import Transfer, transfers

GAPS = st.sampled_from((0, 5, 64, 1 << 20))
"""Bytes that are read along; the widest joins a whole rank's memory into one stretch."""


@settings(max_examples=2 * settings.default.max_examples)
@given(transfers(), st.sampled_from(("direct", "over-read", "staged", "staged, landed")), GAPS)
def test_every_destination_byte_is_the_right_one_or_untouched(transfer: Transfer, how: str, gap: int):
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
        expected = expect(rank, sources, transfer.spans, transfer.dst_tables, memory.bytes.copy())
        writes = np.zeros(len(memory.bytes), np.int64)
        for source, template in enumerate(build_templates(sources, rank)):
            for route in template.routes:
                cells = cells_of(transfer, route)
                if how == "direct":
                    copy(as_addresses(route, cells), memories[source], memory, writes)
                else:
                    move(route, way_of(route, how, gap), cells, memories[source], memory, writes)
        expected.check(memory.bytes)
        assert writes.max(initial=0) <= 1, "a byte was read from two places"
        event("moves something" if writes.any() else "moves nothing")


@given(transfers())
def test_indices_and_tally_tell_of_the_same_descriptors_as_addresses_do(transfer: Transfer):
    for template in templates(transfer):
        src_list, dst_list, bases = prepared(template)
        for route, (src_base, dst_base) in zip(template.routes, bases, strict=True):
            cells = cells_of(transfer, route)
            spelled = as_addresses(route, cells)
            indices = as_indices(route, cells, src_base, dst_base)
            assert (src_list[indices.src] == np.stack([spelled.src, spelled.length], 1)).all()
            assert (dst_list[indices.dst] == np.stack([spelled.dst, spelled.length], 1)).all()
            assert tally(route, cells) == counted_one_by_one(route, cells)


def engines(transfer: Transfer) -> tuple[list[RankGeometry], list[RankGeometry]]:
    return ranks(transfer.src, transfer.families), ranks(transfer.dst, transfer.families)


def templates(transfer: Transfer) -> list[Template]:
    sources, destinations = engines(transfer)
    return [template for rank in destinations for template in build_templates(sources, rank)]


def cells_of(transfer: Transfer, route: Route) -> Cells:
    group = transfer.dst.groups[route.dst_group]
    return select_cells(
        route, group.kind, group.reach, transfer.spans[route.dst_group],
        transfer.src_tables[route.src_group], transfer.dst_tables[route.dst_group],
    )  # fmt: skip


def counted_one_by_one(route: Route, cells: Cells) -> Tally:
    """A tally by spelling every descriptor out and merging, phase by phase."""
    merged = []
    for phase in range(len(route.phases)):
        mine = cells.phase == phase
        pieces = as_addresses(route, Cells(cells.src_block[mine], cells.dst_block[mine], cells.phase[mine]))
        merged += merge(pieces.src, pieces.dst, pieces.length).length.tolist()
    return Tally(sum(merged), len(as_addresses(route, cells)), len(merged), max(merged, default=0))


def prepared(template: Template) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """(address, length) of every row in every block, route after route, and where each route begins."""
    src, dst = [np.zeros((7, 2), np.int64)], [np.zeros((3, 2), np.int64)]
    bases = []
    for route in template.routes:
        bases.append((sum(map(len, src)), sum(map(len, dst))))
        rows = route.rows
        src.append(_every_block(rows.src, rows.length, route.src_stride, route.src_blocks))
        dst.append(_every_block(rows.dst, rows.length, route.dst_stride, route.dst_blocks))
    return np.concatenate(src), np.concatenate(dst), bases


def _every_block(first: np.ndarray, length: np.ndarray, stride: int, blocks: int) -> np.ndarray:
    entries = [(a + b * stride, n) for a, n in zip(first, length, strict=True) for b in range(blocks)]
    return np.array(entries, np.int64).reshape(-1, 2)
