"""A load leaves as many blocks free as any request that waits with blocks needs for its next step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.connector.blocks import Headroom
from kvferry.connector.engine import CacheGroup
from kvferry.geometry import GroupKind

BLOCK, STEP = 64, 256
FULL = CacheGroup(kind=GroupKind.FULL, attention_span=0, block_tokens=BLOCK)
WINDOW = CacheGroup(kind=GroupKind.SLIDING, attention_span=64, block_tokens=BLOCK)
GROUPS = [*[WINDOW] * 5, FULL]


def room(free, groups=GROUPS):
    return Headroom(groups, STEP, SimpleNamespace(get_num_free_blocks=lambda: free))


@pytest.mark.parametrize(
    ("total", "tokens", "takes", "needs"),
    [
        (256, 256, 4 + 5 * 1, 0),
        (300, 300, 5 + 5 * 2, 0),
        (256, 464, 4 + 5 * 1, 4 + 5 * 4),
        (256, 1000, 4 + 5 * 1, 12 + 5 * 4),
    ],
    ids=["all of it", "into a block", "the rest in a step", "the rest in several steps"],
)
def test_a_load_takes_its_windows_and_what_follows_whole_steps_of_them(total, tokens, takes, needs):
    for spare in (0, -1):
        crowded = room(takes + needs + spare)
        crowded.on_load_begun("another", 256, 256)
        assert crowded.fits("a", total, tokens) == (spare == 0)


def test_a_single_waiting_request_needs_no_headroom():
    assert room(0).fits("a", 256, 464)


def test_a_waiting_request_keeps_blocks_free_until_it_resumes():
    crowded = room(9 + 23)
    assert len(crowded) == 0
    crowded.on_load_begun("large", 256, 464)
    assert len(crowded) == 1
    assert not crowded.fits("small", 256, 256), "it would leave 23 blocks, and 24 are needed"
    crowded.on_resumed({"another"})
    assert not crowded.fits("small", 256, 256)
    crowded.on_resumed({"large"})
    assert crowded.fits("small", 256, 256)
    crowded.on_load_begun("large", 256, 464)
    crowded.forget("large")
    assert crowded.fits("small", 256, 256)
    assert len(crowded) == 0


def test_a_request_does_not_count_against_its_own_load():
    again = room(9)
    again.on_load_begun("a", 256, 464)
    assert again.fits("a", 256, 256)


def test_without_windows_the_engines_own_count_is_enough():
    dense = Headroom.of((FULL,), STEP, None)
    dense.on_load_begun("a", 256, 464)
    assert dense.fits("b", 256, 256)
    assert len(dense) == 0
