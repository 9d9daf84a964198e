"""An engine that computes nothing reads small prompts in its own thread, while the lane rests."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from kvferry.transport import transfers
from support.waiting import wait_for
from transport import large
from transport.pair import FIRST


@pytest.fixture
def reader(world):
    """A reader of an idle engine whose lane is connected to `P`, and rests."""
    producer = world.shared_producer(large.SPEC, large.FAMILIES, seed=50)
    reader = world.reader(large.RANK)
    reader.thread.connect("P", producer.cards)
    read(reader, "first")
    assert reader.result("first").failure is None
    wait_for(lambda: not reader.thread._lanes[0]._turn.locked())
    reader.idle = True
    reader.posted_by = []
    post = reader.agent.post

    def noted(handle):
        reader.posted_by.append(threading.current_thread())
        return post(handle)

    reader.agent.post = noted
    return reader


def read(reader, key, lease=FIRST):
    reader.submit(key, "P", large.span(2), large.FORWARD, large.BACKWARD, lease)


def read_by_this_thread(reader):
    return [thread is threading.current_thread() for thread in reader.posted_by]


def test_prompt_is_read_in_the_engines_thread_with_its_lease_word(reader):
    read(reader, "now")
    assert reader.result("now").failure is None
    assert read_by_this_thread(reader)[0]
    found, wanted = large.pages(reader.memory.bytes), large.pages(50)
    assert (found[large.BACKWARD[0][:2]] == wanted[1:3]).all()


def test_lane_ends_what_is_still_in_flight(reader):
    reader.agent.gate.clear()
    read(reader, "later")
    assert reader.poll("later") is None
    reader.agent.gate.set()
    assert reader.result("later").failure is None
    assert read_by_this_thread(reader)[0]
    assert not read_by_this_thread(reader)[-1]


def test_lane_that_has_something_to_do_does_the_rest_too(reader):
    reader.agent.gate.clear()
    read(reader, "held")
    wait_for(reader.thread._lanes[0]._turn.locked)
    read(reader, "behind it")
    reader.agent.gate.set()
    assert reader.result("held").failure is None
    assert reader.result("behind it").failure is None
    assert read_by_this_thread(reader)[:1] == [True]
    assert not any(read_by_this_thread(reader)[1:])


def test_large_prompt_is_read_by_the_lane(reader, monkeypatch):
    monkeypatch.setattr(transfers, "READ_NOW_BYTES", 0)
    read(reader, "large")
    assert reader.result("large").failure is None
    assert not any(read_by_this_thread(reader))


def test_lease_that_has_ended_is_noticed(reader):
    read(reader, "ended", replace(FIRST, generation=FIRST.generation + 1))
    assert "lease word changed" in reader.result("ended").failure


def test_nothing_is_read_after_the_end(reader):
    reader.thread.close()
    read(reader, "late")
    assert reader.poll("late") is None
    assert reader.posted_by == []
