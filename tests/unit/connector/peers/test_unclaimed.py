"""Early end of unclaimed leases, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvferry.connector.peers.kept import UnclaimedLeases
from kvferry.transport.lease import LeaseBook
from support.clock import Clock


def test_unclaimed_leases_end_until_enough_blocks_are_free():
    clock = Clock()
    book = LeaseBook(1, 8, 40.0, clock)
    unclaimed = UnclaimedLeases(book, SimpleNamespace(blocks=lambda: 2))
    unclaimed.start(SimpleNamespace(get_num_free_blocks=lambda: 0))
    for name, block_ids in (("a", ([0, 0, 1], [0])), ("b", ([0, 2],)), ("c", ([3],))):
        book.grant(name)
        unclaimed.granted(name, block_ids)
    assert unclaimed.leases_to_end() == []
    clock.now = 11.0
    assert unclaimed.leases_to_end() == ["a", "b"], "block 0 is the null block, which is nobody's"
