"""Lots of a staging area: apart from each other, inside of the area, and all given back."""

import pytest
from hypothesis import given, strategies as st

from kvferry.geometry import Region
from kvferry.transport.staging import UNIT_BYTES, StagingArea
from support.examples import examples

HOST = Region(0, 1)

requests = st.tuples(
    st.integers(1, 300), st.one_of(st.integers(1, 50), st.sampled_from([64, 4096, 65600, 1 << 18, 3 << 19]))
)


@examples(100)
@given(st.integers(1, 12), st.lists(st.tuples(requests, st.booleans()), max_size=30))
def test_images_of_lots_lie_in_the_area_and_in_no_others(units, steps):
    area = StagingArea(units * UNIT_BYTES, HOST)
    held = []
    for (images, stride), gives_back in steps:
        if gives_back and held:
            area.free(held.pop(0)[0])
        allocation = area.allocate(images, stride)
        if allocation is None:
            assert held or (images + 1) * stride > units * UNIT_BYTES, "an empty area has room"
            continue
        low, high = allocation.position * stride, (allocation.position + images) * stride
        assert allocation.unit * UNIT_BYTES <= low
        assert high <= (allocation.unit + allocation.units) * UNIT_BYTES <= area.region.length
        assert allocation.position + images <= area.region.length // stride
        assert all(
            allocation.unit + allocation.units <= o.unit or o.unit + o.units <= allocation.unit
            for o, _, _ in held
        )
        held.append((allocation, low, high))
    for allocation, _, _ in held:
        area.free(allocation)
    whole = area.allocate(units * UNIT_BYTES // 64 - 1, 64)
    assert whole is not None, "everything has been given back"
    assert (whole.unit, whole.units) == (0, units)


def test_an_area_of_no_size_has_no_room():
    area = StagingArea(UNIT_BYTES - 1, HOST)
    assert area.units == area.largest_image == 0
    assert area.allocate(1, 1) is None


def test_the_largest_image_finds_room_in_an_area_of_any_size():
    for units in (1, 2, 3, 5, 64):
        area = StagingArea(units * UNIT_BYTES, HOST)
        assert area.allocate(1, area.largest_image) is not None


@pytest.mark.parametrize("size", [UNIT_BYTES, 3 * UNIT_BYTES])
def test_an_area_begins_where_devices_like_memory_to_begin(size):
    area = StagingArea(size, HOST)
    assert area.region.address % 4096 == 0
    assert area.region.length == size
    assert area.images(64).address == area.region.address
