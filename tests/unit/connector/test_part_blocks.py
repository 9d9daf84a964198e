"""Partly loaded blocks are evicted once vLLM has cached them."""

from __future__ import annotations

import pytest

from kvferry.connector.blocks import PartBlocks
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


def test_a_block_that_is_full_only_after_the_load_is_evicted_too():
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


def test_blocks_of_a_resumed_request_are_evicted_at_the_end_of_a_pass():
    parts, _, block = begun()
    parts.on_resumed("a")
    parts.end_pass()
    assert not parts.evict()
    block.block_hash = b"cached"
    assert not parts.evict(), "what is running comes before what waits"
    parts.end_pass()
    assert block.block_hash is None


@pytest.mark.parametrize(("computed", "watched"), [(454, True), (455, False)])
def test_a_block_before_the_window_belongs_to_another_request(computed, watched):
    parts, one, block = begun()
    parts.on_resumed("a")
    parts.end_pass()
    one.num_computed_tokens, block.block_hash = computed, b"cached"
    assert parts.evict() == watched


def test_blocks_that_another_connector_fills_during_steps_are_masked():
    parts = PartBlocks([GROUP], BlockPool(9))
    parts.distrust_all("a")
    assert parts.masked_tables("a", ([1, 2], [3])) == ([0, 0], [0])
    assert parts.masked_tables("b", ([1, 2],)) == ([1, 2],)
    parts.forget("a")
    assert parts.masked_tables("a", ([1, 2],)) == ([1, 2],)
