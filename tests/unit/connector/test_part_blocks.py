"""Blocks that loads fill in part: watched until vLLM has cached them, or nobody looks at them."""

from __future__ import annotations

import pytest

from kvferry.connector.part_blocks import PartBlocks
from kvferry.geometry import Group, GroupKind
from kvferry.planning.select import LoadSpan
from support.block_pool import BlockPool, request

GROUP = Group(GroupKind.SLIDING, 256, 200, ())


def begun():
    """A load of 250 tokens into one block: 250 sees tokens from 51 on, which come from 32 on."""
    pool = BlockPool(9)
    parts, one = PartBlocks([GROUP], pool), request("a", range(251))
    (block,) = pool.allocate(1)
    parts.begin(one, ([block.block_id],), LoadSpan(0, 250, 251), (32,))
    return parts, one, block


def test_a_block_that_is_full_only_after_the_load_leaves_the_prefix_cache_as_well():
    parts, one, block = begun()
    one.num_computed_tokens = 250
    parts.on_resumed("a")
    parts.end_pass()
    assert not parts.evict(), "it is not full yet"
    parts.end_pass()
    one.num_computed_tokens, block.block_hash = 256, b"six tokens later"
    assert parts.evict()
    assert block.block_hash is None
    parts.end_pass()
    block.block_hash = b"vLLM caches a block once: this is somebody else"
    assert not parts.evict()


def test_what_had_gone_on_before_a_pass_is_looked_at_once_in_it():
    parts, _, block = begun()
    parts.on_resumed("a")
    parts.end_pass()
    assert not parts.evict()
    block.block_hash = b"cached"
    assert not parts.evict(), "what is running comes before what waits"
    parts.end_pass()
    assert block.block_hash is None


@pytest.mark.parametrize(("computed", "watched"), [(454, True), (455, False)])
def test_a_block_that_nobody_sees_any_more_is_somebody_elses(computed, watched):
    parts, one, block = begun()
    parts.on_resumed("a")
    parts.end_pass()
    one.num_computed_tokens, block.block_hash = computed, b"cached"
    assert parts.evict() == watched


def test_nothing_is_whole_of_a_request_that_another_connector_loads_as_it_is_used():
    parts = PartBlocks([GROUP], BlockPool(9))
    parts.distrust_all("a")
    assert parts.masked_tables("a", ([1, 2], [3])) == ([0, 0], [0])
    assert parts.masked_tables("b", ([1, 2],)) == ([1, 2],)
    parts.forget("a")
    assert parts.masked_tables("a", ([1, 2],)) == ([1, 2],)
