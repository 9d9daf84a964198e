"""A tier of whole chunks behind shares: what is gathered is stored, and what is fetched is scattered."""

from __future__ import annotations

import queue
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest

from kvferry.common.errors import TransferError
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.shares.tier import ShareTier
from support.chunk_files import key
from support.stores import GROUP, body, open_store

BYTES = len(body(1))
SHARE = BYTES // 2


class TwoHalves:
    """An exchange of two machines, each with a half of the bytes. The second fails when a test says so."""

    def __init__(self) -> None:
        self.lost, self.fails = "", False
        self.far = bytearray(SHARE)
        self.taken: list[queue.SimpleQueue[np.ndarray]] = []

    def take_buffers(self, count: int) -> queue.SimpleQueue[np.ndarray]:
        found: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        for _ in range(count):
            found.put(np.full(BYTES, 7, np.uint8))
        self.taken.append(found)
        return found

    def _check(self) -> None:
        if self.fails:
            self.lost = "gone"
            raise TransferError(self.lost)

    def move(self, operation: str, group: str, share: memoryview, chunk: np.ndarray) -> None:
        assert group == GROUP.name
        if operation == "READ":
            self._check()
            chunk[:SHARE], chunk[SHARE:] = np.frombuffer(share, np.uint8), np.frombuffer(self.far, np.uint8)
        else:
            share[:] = chunk[:SHARE]
            self._check()
            self.far[:] = chunk[SHARE:].tobytes()


@pytest.fixture
def exchange() -> TwoHalves:
    return TwoHalves()


@pytest.fixture
def tier(exchange: TwoHalves, tmp_path) -> ShareTier:
    return ShareTier(open_store(tmp_path), exchange)


def put(tier: ShareTier, exchange: TwoHalves, number: int) -> PutOutcome:
    whole = bytes(body(number))
    exchange.far[:] = whole[SHARE:]
    return tier.put(key(number), GROUP, memoryview(bytearray(whole[:SHARE])))


def get(tier: ShareTier, exchange: TwoHalves, number: int) -> tuple[GetOutcome, bool]:
    exchange.far[:], into = bytes(SHARE), bytearray(SHARE)
    outcome = tier.get(key(number), GROUP, memoryview(into))
    return outcome, into + exchange.far == bytes(body(number))


def test_shares_are_stored_as_a_whole_chunk_that_another_engine_reads(tier, exchange, tmp_path) -> None:
    assert put(tier, exchange, 1) is PutOutcome.STORED
    other = open_store(tmp_path)
    other.refresh()
    into = memoryview(np.zeros(BYTES, np.uint8))
    assert other.get(key(1), GROUP, into) is GetOutcome.HIT
    assert into == body(1)
    assert get(tier, exchange, 1) == (GetOutcome.HIT, True)
    assert get(tier, exchange, 2) == (GetOutcome.ABSENT, False)


@pytest.mark.parametrize("step", [put, get])
def test_a_machine_that_fails_loses_the_tier_and_nothing_is_stored_in_part(
    tier: ShareTier, exchange: TwoHalves, step: Callable[..., object]
) -> None:
    assert put(tier, exchange, 1) is PutOutcome.STORED
    exchange.fails = True
    found = step(tier, exchange, 1 if step is get else 3)
    assert found in (PutOutcome.IO_ERROR, (GetOutcome.IO_ERROR, False))
    assert tier.contains([key(1), key(3)]).tolist() == [False, False]
    assert tier.paused
    exchange.fails = False
    assert put(tier, exchange, 4) is PutOutcome.IO_ERROR
    assert get(tier, exchange, 1) == (GetOutcome.IO_ERROR, False)
    assert not tier._tier.contains([key(3)])[0]


def test_a_buffer_into_which_bytes_may_still_arrive_is_not_used_again(tier, exchange) -> None:
    exchange.fails = True
    _, writes = exchange.taken
    before = writes.qsize()
    put(tier, exchange, 1)
    assert writes.qsize() == before - 1


def test_an_error_of_storage_returns_the_buffer(tier, exchange) -> None:
    reads, writes = exchange.taken
    sizes = reads.qsize(), writes.qsize()
    with mock.patch.object(tier._tier, "put", side_effect=OSError("no")), pytest.raises(OSError, match="no"):
        put(tier, exchange, 1)
    with mock.patch.object(tier._tier, "get", side_effect=OSError("no")), pytest.raises(OSError, match="no"):
        get(tier, exchange, 1)
    assert (reads.qsize(), writes.qsize()) == sizes
