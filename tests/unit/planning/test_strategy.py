from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import ConfigError
from kvferry.geometry.rank import GroupKind
from kvferry.planning.strategy import Costs, Strategy, Work, choose_method, transfer_methods
from kvferry.planning.template import build_templates
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache, ModelCache, StoredField

KV = StoredField("kv", 2, 8, (("content", 256),))
MODEL = ModelCache("dense", (LayerCache(GroupKind.FULL, 0, (KV,)),) * 4)
COSTS = Costs()
ROOM = 16 << 20


def route(src_layout: str, dst_layout: str, src_tp: int = 1, dst_tp: int = 1):
    src = lay_out(MODEL, EngineShape(src_tp, (4,), 16, src_layout, 64))
    dst = lay_out(MODEL, EngineShape(dst_tp, (4,), 16, dst_layout, 64))
    return build_templates(src, dst[0])[0].routes[0]


def chosen(found_route, cells: int = 256, costs: Costs = COSTS) -> Strategy:
    found = transfer_methods(found_route, costs, ROOM)
    return found[choose_method(found, cells, costs)].strategy


def test_long_runs_go_direct():
    assert chosen(route("BHLNC", "BHLNC")) is Strategy.DIRECT


def test_many_short_runs_do_not():
    assert route("LBNHC", "LBHNC").run_count == 4 * 16 * 8
    assert chosen(route("LBNHC", "LBHNC")) is not Strategy.DIRECT


def test_little_goes_direct_where_asking_costs_more():
    costs = Costs(ask_seconds=0.5)
    found = transfer_methods(route("LBNHC", "LBNHC", 1, 2), costs, ROOM)
    assert found[choose_method(found, 1, costs)].strategy is not Strategy.STAGED


def test_copies_of_either_side_are_part_of_the_work():
    """One layer of half the heads: one loop, a run per token."""
    found = {
        (way.strategy, way.landing is None): way
        for way in transfer_methods(route("LBNHC", "LBNHC", 1, 2), COSTS, ROOM)
    }
    copies = {
        of: (way.work.gather_calls, way.work.gather_runs, way.work.scatter_calls, way.work.scatter_runs)
        for of, way in found.items()
    }
    runs = 4 * 16
    assert copies[Strategy.DIRECT, True] == (0, 0, 0, 0)
    assert copies[Strategy.OVER_READ, True][:2] == (0, 0)
    assert copies[Strategy.OVER_READ, True][2:] == copies[Strategy.STAGED, True][:2]
    assert copies[Strategy.STAGED, True][2:] == (0, 0)
    assert copies[Strategy.STAGED, True][1] == runs
    assert copies[Strategy.STAGED, False][:2] == copies[Strategy.STAGED, True][:2]
    assert all(0 < copies[Strategy.STAGED, False][at] <= runs for at in (2, 3))


def test_half_the_heads_read_whole_is_twice_the_bytes():
    found = {way.strategy: way for way in transfer_methods(route("LBNHC", "LBNHC", 1, 2), COSTS, ROOM)}
    direct, over = found[Strategy.DIRECT].work, found[Strategy.OVER_READ].work
    page = 16 * 8 * 512
    assert direct.descriptors == 4 * 16
    assert over.descriptors == 4
    assert over.read_bytes == pytest.approx(4 * page, rel=0.05)
    assert direct.read_bytes == 4 * page / 2


def test_a_staged_image_lands_in_one_stretch_per_page():
    staged = [
        way
        for way in transfer_methods(route("LBNHC", "LBNHC", 1, 2), COSTS, ROOM)
        if way.strategy == "staged"
    ]
    in_place = next(way for way in staged if way.landing is None)
    landed = next(way for way in staged if way.landing is not None)
    assert in_place.work.descriptors == 4
    assert landed.work.descriptors == 0
    assert landed.work.scatter_runs == 4


def test_a_pinned_strategy_is_taken_where_it_is_possible():
    found = transfer_methods(route("BHLNC", "BHLNC"), COSTS, ROOM, shared=True)
    for strategy in Strategy:
        assert found[choose_method(found, 9, COSTS, strategy)].strategy is strategy
    direct_only = [way for way in found if way.strategy is Strategy.DIRECT]
    assert choose_method(direct_only, 9, COSTS, Strategy.STAGED) == 0


def test_host_memory_that_both_map_replaces_slow_reads():
    """At 0.5 GB/s a READ of long runs takes longer than two copies; a READ of words stays."""
    found = transfer_methods(route("BHLNC", "BHLNC"), COSTS, ROOM, shared=True)
    slow = replace(COSTS, read_byte_seconds=2e-9)
    assert found[choose_method(found, 256, COSTS)].strategy is Strategy.DIRECT
    assert found[choose_method(found, 256, slow)].strategy is Strategy.SHARED
    apart = [way for way in found if way.strategy is not Strategy.SHARED]
    ratio = apart[0].work.seconds(256, slow) / found[-1].work.seconds(256, slow)
    assert ratio == pytest.approx(2e-9 / (COSTS.copy_byte_seconds * 2), rel=0.3)


def test_images_that_have_no_room_are_no_way():
    assert {way.strategy for way in transfer_methods(route("LBNHC", "LBHNC"), COSTS, 1000)} == {
        Strategy.DIRECT
    }


def test_a_pipeline_is_as_slow_as_its_slower_end():
    work = Work(descriptors=0, read_bytes=1 << 20, gather_calls=1, gather_runs=1, bytes=1 << 20)
    slow_gather = Costs(copy_byte_seconds=1e-9, read_byte_seconds=1e-11, ask_seconds=0)
    alone = 400 * (1 << 20) * 1e-9
    assert work.seconds(400, slow_gather) == pytest.approx(alone, rel=0.05)


def test_costs_are_below_a_second():
    with pytest.raises(ConfigError, match="ask_seconds is 2"):
        Costs(ask_seconds=2)


FRACTIONS = st.sampled_from([0.0, 0.1, 0.5, 1.0])


@given(
    exponents=st.lists(st.integers(-12, -3), min_size=6, max_size=6),
    overlap=FRACTIONS,
    gains=st.tuples(st.sampled_from([1.0, 1.8, 4.0]), st.sampled_from([1.0, 1.2, 4.0])),
    parallel=st.sampled_from([(1, 1), (1, 2), (2, 1)]),
    layouts=st.tuples(st.sampled_from(["LBNHC", "LBHNC", "BHLNC"]), st.sampled_from(["LBNHC", "BHLNC"])),
    strategy=st.sampled_from([None, *Strategy]),
)
def test_no_other_method_of_the_strategy_takes_less_time(
    exponents, overlap, gains, parallel, layouts, strategy
):
    costs = Costs(*(10.0**exponent for exponent in exponents), overlap, *gains)
    methods = transfer_methods(route(*layouts, *parallel), costs, ROOM, shared=True)
    for found, cells in product((methods, methods[::-1]), (1, 3, 17, 64, 400, 10_000)):
        choice = found[choose_method(found, cells, costs, strategy)]
        alike = [way for way in found if strategy is None or way.strategy is strategy]
        # Whether memory that both map is considered depends on the costs; see the test of slow reads.
        if strategy is None and choice.strategy is not Strategy.SHARED:
            alike = [way for way in alike if way.strategy is not Strategy.SHARED]
        least = min(way.work.seconds(cells, costs) for way in alike)
        assert choice.work.seconds(cells, costs) == pytest.approx(least)
