"""What the costs of a machine say about ways."""

from __future__ import annotations

import pytest

from kvferry.common.errors import ConfigError
from kvferry.planning.strategy import Costs, Work, segment_bytes

CELL = 1 << 20
COSTS = Costs(2e-6, 1e-10, 1e-6, 1e-8, 1e-10, 3e-4, 0.0, 1.0, 1.0)
DIRECT = Work(512, CELL, bytes=CELL)
STAGED = Work(1, CELL, 1, 512, bytes=CELL)


def test_direct_is_descriptors_and_bytes() -> None:
    assert DIRECT.seconds(10, COSTS) == pytest.approx(10 * (512 * 2e-6 + CELL * 1e-10))


def test_gather_is_requested_segment_by_segment() -> None:
    cells = 64
    chunks = cells * CELL / segment_bytes(cells * CELL)
    gather = cells * (1e-6 + 512 * 1e-8 + CELL * 1e-10)
    read = cells * (2e-6 + CELL * 1e-10) + chunks * 2e-6
    assert STAGED.seconds(cells, COSTS) == pytest.approx(chunks * 3e-4 + gather + read)


def test_overlap_hides_all_segments_but_one() -> None:
    hides = Costs(2e-6, 1e-10, 1e-6, 1e-8, 1e-10, 3e-4, 1.0, 1.0, 1.0)
    assert STAGED.seconds(1, hides) == pytest.approx(STAGED.seconds(1, COSTS))
    alone, hidden = (STAGED.seconds(1024, costs) for costs in (COSTS, hides))
    assert 0.5 * alone < hidden < 0.6 * alone


def test_lanes_speed_up_reads_and_scatters_but_no_gathers() -> None:
    lanes = Costs(2e-6, 1e-10, 1e-6, 1e-8, 1e-10, 3e-4, 0.0, 4.0, 2.0)
    assert DIRECT.seconds(3, lanes) == DIRECT.seconds(3, COSTS)
    assert DIRECT.seconds(4, lanes) == pytest.approx(4 * (512 * 2e-6 / 4 + CELL * 1e-10 / 2))
    gather = 64 * (1e-6 + 512 * 1e-8 + CELL * 1e-10)
    saved = 64 * (2e-6 * 3 / 4 + CELL * 1e-10 / 2)
    assert STAGED.seconds(64, COSTS) - STAGED.seconds(64, lanes) == pytest.approx(saved)
    assert STAGED.seconds(64, lanes) > gather


def test_a_few_cells_go_direct_and_many_staged() -> None:
    few = Work(16, CELL, bytes=CELL), STAGED
    assert few[0].seconds(1, COSTS) < few[1].seconds(1, COSTS)
    assert DIRECT.seconds(64, COSTS) > STAGED.seconds(64, COSTS)


@pytest.mark.parametrize(("total", "chunk"), [(1 << 20, 2 << 20), (16 << 20, 4 << 20), (1 << 33, 16 << 20)])
def test_segment_bytes_have_bounds(total: int, chunk: int) -> None:
    assert segment_bytes(total) == chunk


@pytest.mark.parametrize(
    "change", [{"overlap": 1.5}, {"lanes_byte_gain": 0.5}, {"ask_seconds": -1e-9}, {"copy_run_seconds": 2.0}]
)
def test_impossible_costs_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        Costs(**change)
