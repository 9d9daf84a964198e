"""Cells of a block: where they lie on each side, and what that costs, whatever the two block sizes."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvferry.geometry import Axis, Field, GroupKind, PageFormat
from kvferry.planning.cell_copy import CellCopy, plan_page_copy, split_tokens
from kvferry.planning.prepared_lists import TransferCounts, count_transfer
from kvferry.planning.select import Cells
from kvferry.planning.strategy import Costs, transfer_methods
from kvferry.planning.strided_copy import StridedCopy
from kvferry.planning.template import Route, build_templates
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache, ModelCache, StoredField
from support.examples import examples

KERNELS = st.tuples(st.integers(1, 8), st.integers(1, 8))


def page(*kernels: tuple[int, int], item: int = 2) -> PageFormat:
    """K transposed and V not, in kernel blocks; K and V of a kernel block are planes side by side."""
    ((tokens, count),) = kernels
    size = 3 * item * tokens
    k, v = (
        (Axis("token", ((count, 2 * size), (tokens, step))), Axis("content", ((3, inside),)))
        for step, inside in ((item, item * tokens), (3 * item, item))
    )
    fields = Field("k", item, 0, k), Field("v", item, size, v)
    return PageFormat("planes", tokens * count, 2 * size * count, fields)


@examples(40)
@given(KERNELS, KERNELS, st.integers(1, 6))
def test_every_byte_of_every_cell_is_copied_to_its_place(src, dst, times):
    """All tokens of both blocks, one by one."""
    sides = [page((tokens, count * times)) for tokens, count in (src, dst)]
    moved = plan_page_copy(*sides)
    for number in range(moved.src_cells * moved.dst_cells):
        found = []
        for cell_copy in moved.cell_copies:
            src_at, dst_at = (
                cell_copy.src_offsets[number % moved.src_cells],
                cell_copy.dst_offsets[number % moved.dst_cells],
            )
            for copy in cell_copy.copies:
                runs = copy.at(src_at, dst_at).descriptors()
                for a, b, length in zip(runs.src, runs.dst, runs.length, strict=True):
                    found += [(int(a) + at, int(b) + at) for at in range(length)]
        assert sorted(found) == sorted(_bytes_of(moved.cell_tokens, number, *sides))


def _bytes_of(cell: int, number: int, src: PageFormat, dst: PageFormat):
    """(source, destination) of every byte of a cell, from the pages alone."""
    for here, there in zip(src.fields, dst.fields, strict=True):
        offsets = [[axis.offsets() for axis in field.axes] for field in (here, there)]
        for token in range(cell):
            a, b = ((number * cell + token) % side.block_tokens for side in (src, dst))
            for inside in range(3):
                first = here.offset + offsets[0][0][a] + offsets[0][1][inside]
                second = there.offset + offsets[1][0][b] + offsets[1][1][inside]
                yield from ((int(first) + at, int(second) + at) for at in range(here.item_bytes))


def test_cells_that_lie_across_kernel_blocks_differently_are_planes_of_their_own():
    # Blocks of 48, in kernel blocks of 16, to blocks of 96 in kernel blocks of 32: cells of 48 tokens. The
    # second one of a block of 96 begins in the middle of a kernel block.
    moved = plan_page_copy(page((16, 3)), page((32, 3)))
    assert (moved.cell_tokens, moved.src_cells, moved.dst_cells) == (48, 1, 2)
    assert len(moved.cell_copies) == 4
    assert {cell_copy.dst_offsets for cell_copy in moved.cell_copies if cell_copy.dst_offsets[0] == 0} == {
        cell_copy.dst_offsets for cell_copy in moved.cell_copies
    }


def test_tokens_that_descend_begin_at_the_cell_that_lies_lowest():
    ((src_at, dst_at, src, dst),) = split_tokens(
        np.arange(6).reshape(3, 2) * -4, np.arange(6).reshape(3, 2) * 4
    )
    assert (src_at, src.tolist()) == ((16, 8, 0), [-16, -20])
    assert (dst_at, dst.tolist()) == ((0, 8, 16), [0, 4])


KV = LayerCache(GroupKind.FULL, 0, tuple(StoredField(name, 2, 4, (("content", 64),)) for name in "kv"))


def routes(src: int, dst: int, layout: str = "LBHNC") -> Route:
    sides = [
        lay_out(ModelCache("made up", (KV,) * 3), EngineShape(1, (3,), n, layout, 40)) for n in (src, dst)
    ]
    ((route,),) = (template.routes for template in build_templates(sides[0], sides[1][0]))
    return route


def numbers(route: Route) -> int:
    """How many numbers say what a route moves, in all ways of it."""
    found = [*transfer_methods(route, Costs(), 1 << 30)]
    parts = [part for way in found if way.image for part in (*way.image.pool_copies, *way.image.reads)]
    parts += [part for way in found for part in way.landing or ()]
    offsets = sum(len(cell_copy.src_offsets) + len(cell_copy.dst_offsets) for cell_copy in route.cell_copies)
    offsets += sum(len(part.at) for part in parts)
    loops = [*route.copies, *(copy for part in parts for copy in getattr(part, "nests", ()))]
    runs = sum(len(part.descriptors) for part in (*route.cell_copies, *parts) if hasattr(part, "descriptors"))
    return offsets + len(loops) + runs


@pytest.mark.parametrize(("src", "dst"), [(784, 400), (2096, 1056), (5760, 2944), (1024, 1023)])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BHLNC"])
def test_plan_of_two_block_sizes_grows_with_their_sum(src, dst, layout):
    few, many = routes(src, src, layout), routes(src, dst, layout)
    cells = many.src_cells + many.dst_cells
    assert cells == (src + dst) // many.cell_tokens
    # What one cell takes, and a few offsets for each cell of either block.
    assert numbers(many) <= 16 * (numbers(few) + many.run_count + cells)
    assert (
        sum(len(cell_copy.src_offsets) + len(cell_copy.dst_offsets) for cell_copy in many.cell_copies)
        <= 2 * cells
    )


def test_route_counts_its_runs_by_length():
    route = routes(784, 400)
    assert sum(kind.length * kind.number for kind in route.run_kinds) == route.runs.total_bytes
    assert sum(kind.number for kind in route.run_kinds) == len(route.runs)


def test_the_last_cell_of_a_block_may_touch_the_first_of_the_next():
    """Cells of a block lie apart, at its ends: the last of block 1 and the first of block 2 are one run."""
    cell_copy = CellCopy((0, 48), (0, 48), (StridedCopy(0, 0, 16),))
    route = Route(
        src_group=0, dst_group=0, layers=("a",), cell_tokens=16, src_cells=2, dst_cells=2,
        src_stride=64, dst_stride=64, src_blocks=9, dst_blocks=9, cell_copies=(cell_copy,),
    )  # fmt: skip
    ids, number = np.array([1, 1, 2, 2]), np.arange(4)
    assert count_transfer(route, Cells(ids, ids, number, number)) == TransferCounts(64, 4, 3, 32)
    apart = Cells(ids, np.array([1, 1, 3, 3]), number, number)
    assert count_transfer(route, apart) == TransferCounts(64, 4, 4, 16)
