"""What each lane reads of an order."""

import pytest
from hypothesis import given, strategies as st

from kvferry.planning.select import LoadSpan
from kvferry.transport.lease import LeaseWord
from kvferry.transport.read_plan import ReadOrder


def share_of(
    cells: range, number: int, lanes: int, least: int, cell_bytes: int, route: int, per_block: int = 1
) -> range:
    order = ReadOrder("", "", LoadSpan(0, 1, 1), (), (), LeaseWord(0, 0, 1), share=number, shares=lanes)
    size = len(cells) * cell_bytes
    return range(*order.take_share((cells.start, cells.stop), per_block, size, least, route))


@given(
    first=st.integers(0, 30),
    count=st.integers(0, 100),
    per_block=st.integers(1, 5),
    lanes=st.integers(1, 5),
    least=st.sampled_from([1, 100, 1000]),
    route=st.integers(0, 7),
)
def test_every_cell_is_in_one_share_and_so_are_all_of_a_block(first, count, per_block, lanes, least, route):
    cells = range(first, first + count)
    shares = [share_of(cells, n, lanes, least, 10, route, per_block) for n in range(lanes)]
    assert sorted(cell for share in shares for cell in share) == list(cells)
    of_block = [{cell // per_block for cell in share} for share in shares]
    assert sum(map(len, of_block)) == len({cell // per_block for cell in cells})
    assert sum(map(bool, of_block)) <= max(1, 10 * len(cells) // least)


@pytest.mark.parametrize(("cells", "used"), [(1, 1), (99, 1), (100, 1), (200, 2), (400, 4), (1000, 4)])
def test_a_lane_gets_enough_or_nothing(cells, used):
    shares = [share_of(range(cells), n, 4, 1000, 10, 0) for n in range(4)]
    assert [len(share) > 0 for share in shares] == [n < used for n in range(4)]


def test_large_cells_of_several_routes_go_to_lanes_in_turn():
    taken = [[len(share_of(range(1), n, 2, 1, 1, route)) for n in range(2)] for route in range(3)]
    assert taken == [[1, 0], [0, 1], [1, 0]]
