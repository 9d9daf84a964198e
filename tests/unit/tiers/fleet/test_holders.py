"""The engines that are believed to have chunks: whom to believe, and for how long."""

from __future__ import annotations

from hashlib import sha256

import pytest

from kvferry.tiers.fleet.holders import FRESH_SECONDS, STRUCK_OUT_SECONDS, KnownHolders
from kvferry.tiers.index import TierKeys
from support.clock import Clock

HERE, THERE = ("10.0.0.1", 5700), ("10.0.0.2", 5700)
KEYS = [sha256(b"%d" % number).digest() for number in range(4)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def known(clock: Clock) -> KnownHolders:
    return KnownHolders(TierKeys(None), clock)


def test_engine_that_is_struck_out_is_not_believed_to_have_anything_for_a_while(
    known: KnownHolders, clock: Clock
) -> None:
    known.add(KEYS[:2], HERE)
    known.add(KEYS[1:3], THERE)
    known.strike_out(HERE)
    assert [known.of(key) for key in KEYS] == [[], [THERE], [THERE], []]
    known.add(KEYS, HERE)
    assert known.of(KEYS[3]) == []
    clock.now += STRUCK_OUT_SECONDS
    known.expire()
    known.add(KEYS[3:], HERE)
    assert known.of(KEYS[3]) == [HERE]
    assert FRESH_SECONDS > STRUCK_OUT_SECONDS


def test_engine_that_answers_is_believed_again_at_once(known: KnownHolders) -> None:
    known.strike_out(HERE)
    known.readmit(HERE)
    known.add(KEYS, HERE)
    assert known.of(KEYS[0]) == [HERE]
