"""What each lane reads of an order."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvferry.planning.select import Cells, LoadSpan
from kvferry.transport.lease import LeaseWord
from kvferry.transport.read_plan import ReadOrder


def share_of(cells: Cells, number: int, lanes: int, least: int, cell_bytes: int, route: int) -> Cells:
    order = ReadOrder("", "", LoadSpan(0, 1, 1), (), (), LeaseWord(0, 0, 1), share=number, shares=lanes)
    return order.select(cells, len(cells) * cell_bytes, least, route)


@given(
    per_block=st.lists(st.integers(1, 4), max_size=40),
    lanes=st.integers(1, 5),
    least=st.sampled_from([1, 100, 1000]),
    route=st.integers(0, 7),
)
def test_every_cell_is_in_one_share_and_so_are_all_of_a_block(per_block, lanes, least, route):
    blocks = np.repeat(np.arange(len(per_block), dtype=np.int64), per_block)
    number = np.arange(len(blocks), dtype=np.int64)
    cells = Cells(number, blocks, number % 3)
    shares = [share_of(cells, n, lanes, least, 10, route) for n in range(lanes)]
    assert sorted(np.concatenate([share.src_block for share in shares]).tolist()) == number.tolist()
    of_block = [set(share.dst_block.tolist()) for share in shares]
    assert sum(map(len, of_block)) == len(per_block)
    assert all((np.diff(share.src_block) == 1).all() for share in shares)
    assert sum(map(bool, of_block)) <= max(1, 10 * len(blocks) // least)


@pytest.mark.parametrize(("cells", "used"), [(1, 1), (99, 1), (100, 1), (200, 2), (400, 4), (1000, 4)])
def test_a_lane_gets_enough_or_nothing(cells, used):
    ids = np.arange(cells, dtype=np.int64)
    shares = [share_of(Cells(ids, ids, ids * 0), n, 4, 1000, 10, 0) for n in range(4)]
    assert [len(share) > 0 for share in shares] == [n < used for n in range(4)]


def test_large_cells_of_several_routes_go_to_lanes_in_turn():
    one = np.ones(1, np.int64)
    taken = [
        [len(share_of(Cells(one, one, one * 0), n, 2, 1, 1, route)) for n in range(2)] for route in range(3)
    ]
    assert taken == [[1, 0], [0, 1], [1, 0]]
