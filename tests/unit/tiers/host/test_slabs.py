"""Slots of several sizes in one memory."""

from __future__ import annotations

import random

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tiers.host.slabs import Slabs


def test_slots_never_overlap_and_everything_given_back_is_there_again():
    chance = random.Random(3)
    slabs, taken = Slabs(1000, [7, 20]), {}
    for _ in range(3000):
        stride = chance.choice([7, 20])
        if chance.random() < 0.55 and (offset := slabs.take(stride)) is not None:
            assert all(at + size <= offset or offset + stride <= at for at, size in taken.items())
            assert 0 <= offset <= slabs.capacity_bytes - stride
            taken[offset] = stride
        elif taken:
            offset = chance.choice(list(taken))
            del taken[offset]
            slabs.free(offset)
        assert slabs.used_bytes == sum(taken.values())
        slabs.check_integrity()
    for offset in taken:
        slabs.free(offset)
    slabs.check_integrity()
    assert sum(slabs.take(20) is not None for _ in range(1000)) == slabs.count * (slabs.slab_bytes // 20)
    assert slabs.take(7) is None


def test_single_slot_size_uses_all_memory():
    slabs = Slabs(1_000_003, [1000])
    assert sum(slabs.take(1000) is not None for _ in range(2000)) == 1000


@pytest.mark.parametrize("strides", [(6 << 20, 38 << 20), (4096, 400 << 20), (3, 7, 11, 13)])
def test_hardly_anything_is_lost_at_the_ends_of_slabs(strides):
    capacity = 200 * max(strides)
    slabs = Slabs(capacity, strides)
    for stride in strides:
        usable = slabs.count * (slabs.slab_bytes // stride) * stride
        assert usable > 0.9 * capacity


def test_a_slab_is_offered_to_another_size_when_as_much_is_free():
    slabs = Slabs(600, [10, 30])
    per_slab = slabs.slab_bytes // 10
    offsets = [slabs.take(10) for _ in range(slabs.count * per_slab)]
    assert slabs.take(30) is None
    for offset in offsets[: per_slab - 1]:
        slabs.free(offset)
    assert slabs.reclaimable(30) == []
    slabs.free(offsets[-1])
    assert slabs.reclaimable(30) == [offsets[0] // slabs.slab_bytes, offsets[-1] // slabs.slab_bytes]
    assert slabs.reclaimable(10) == []
    slabs.free(offsets[per_slab - 1])
    assert slabs.take(30) is not None


def test_a_capacity_without_a_slab_for_every_size_is_refused():
    with pytest.raises(ConfigError, match="chunks of 2 sizes up to 80 bytes need 160 or more"):
        Slabs(159, [10, 80])


def test_memory_that_is_not_allocated_yet_is_not_used():
    ready = 0
    slabs = Slabs(1000, [10], lambda: ready)
    assert slabs.take(10) is None
    ready = 2 * slabs.slab_bytes + 1
    taken = [slabs.take(10) for _ in range(2 * slabs.slab_bytes // 10)]
    assert max(taken) + 10 == 2 * slabs.slab_bytes
    assert slabs.take(10) is None, "only a byte of the next slab is there"
    slabs.free(taken[0])
    assert slabs.take(10) == taken[0]
    ready = 1000
    assert slabs.take(10) == 2 * slabs.slab_bytes
    slabs.check_integrity()
