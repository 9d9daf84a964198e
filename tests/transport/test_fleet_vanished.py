"""A holder whose machine vanishes from the network while it is read: it costs what it has, and no more."""

from __future__ import annotations

import time

import pytest

from kvferry.tiers.fleet.arena_reader import READ_SECONDS
from support.namespaces import NotPermitted, hosts_on_a_network
from transport.fleet import GROUPS, Reader, There, key

BOTH = [key(number) for number in range(12)]
ONE = [key(number) for number in range(20, 24)]
"""Chunks that only the holder that stays has."""


def test_holder_that_vanishes_while_it_is_read_delays_reads_from_others_by_seconds_and_holds_few_slots():
    try:
        with hosts_on_a_network(3) as hosts:
            vanishes(*hosts)
    except NotPermitted as error:
        pytest.skip(str(error))


def vanishes(here, lost, other):
    with There(lost) as holder, There(other) as second:
        holder.call("store", *BOTH)
        second.call("store", *BOTH, *ONE)
        asked = [holder.address, second.address]
        with There(here, Reader, engines=asked, find_seconds=2.0) as reader:
            # Of both, so that both are connected.
            assert reader.call("begin", *BOTH[:6]) == 6
            assert reader.call("end", 10)[1:] == (None, 6)
            assert holder.call("served") > 0
            assert second.call("served") > 0

            reader.call("hold_reads")
            assert reader.call("begin", *BOTH[6:]) == 6
            time.sleep(0.5)  # until both have been asked
            lost.cut()
            reader.call("release_reads")
            took, failure, chunks = reader.call("end", 20)
            assert (failure, chunks) == (None, 6), "what the other holder has is read there"
            assert READ_SECONDS < took < READ_SECONDS + 4
            slots, size = reader.call("late")
            assert slots > 0, "no READ was in flight when the holder vanished"
            assert size == slots * GROUPS[0].chunk_bytes

            assert reader.call("begin", *ONE) == 4
            took, failure, chunks = reader.call("end", 20)
            assert (failure, chunks) == (None, 4)
            assert took < 1, "a holder that has vanished delays what it does not have"

            lost.mend()
            deadline = time.monotonic() + 30
            while reader.call("late") != (0, 0):
                assert time.monotonic() < deadline, "slots stay held after the last READ has ended"
                time.sleep(0.2)
            reader.call("check")
