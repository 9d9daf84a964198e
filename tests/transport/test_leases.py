"""The lease word: blocks that were given back are never taken for good."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.transport.lease import LeaseWord
from support.local_agent import Trusting
from support.memory import memory
from support.waiting import wait_for
from transport import large
from transport.pair import INCARNATION
from transport.producer import SLOTS

GONE = "gave the blocks back before they were read"


@pytest.fixture
def producer(world):
    return world.shared_producer(large.SPEC, large.FAMILIES, seed=7)


@pytest.fixture
def reader(world, producer):
    reader = world.reader(large.RANK)
    reader.thread.connect("P", producer.cards)
    return reader


def test_a_word_that_was_raised_before_the_read_is_a_failure_and_only_for_its_slot(reader, producer):
    producer.tell("end", [3])
    reader.submit("late", "P", large.span(2), large.FORWARD, large.FORWARD, LeaseWord(3, 0, 1))
    reader.submit("other slot", "P", large.span(2), large.FORWARD, large.FORWARD, LeaseWord(4, 0, 1))
    reader.submit(
        "same slot, next lease", "P", large.span(2), large.FORWARD, large.FORWARD, LeaseWord(3, 1, 1)
    )
    late = reader.result("late")
    assert GONE in late.failure
    assert not late.peer_lost, "another lease may hold"
    assert reader.result("other slot").failure is None
    assert reader.result("same slot, next lease").failure is None


def test_a_word_that_is_raised_after_the_data_was_read_and_before_it_is_known_is_a_failure(reader, producer):
    reader.agent.gate.clear()
    reader.submit("load", "P", large.span(2), large.FORWARD, large.FORWARD)
    wait_for(lambda: reader.agent.posted)
    assert reader.poll("load") is None
    assert reader.agent.posted == 1, "the word is asked for after the data, not with it"
    producer.tell("end", [0])
    producer.tell("zero")
    reader.agent.gate.set()
    assert GONE in reader.result("load").failure


@pytest.mark.long
def test_blocks_reused_while_they_are_read_are_never_taken_for_good(over_tcp, world):
    producer = world.producer(large.SPEC, large.FAMILIES, seed=7)
    reader = world.reader(large.RANK)
    reader.thread.connect("P", producer.cards)
    wanted = large.pages(7)[1:]
    for attempt in range(3):
        key = f"load {attempt}"
        reader.submit(key, "P", large.SPAN, large.FORWARD, large.FORWARD, LeaseWord(0, attempt, 1))
        producer.tell("end", [0])
        if attempt == 1:
            producer.tell("zero")
        result = reader.result(key)
        if result.failure is None:
            assert (large.pages(reader.memory.bytes)[1:] == wanted).all()
        else:
            assert GONE in result.failure


def test_a_word_of_another_run_of_the_worker_is_a_failure(world, producer):
    reader = world.reader(large.RANK, validator=Trusting())  # it restarted after its metadata had been tried
    (card,) = producer.cards
    restarted = type(card)(card.geometry, card.agent, card.words_address, card.words, INCARNATION + 1)
    reader.thread.connect("P", [restarted])
    reader.submit("load", "P", large.span(1), large.FORWARD, large.FORWARD)
    result = reader.result("load")
    assert result.failure == "another run of the producer has the memory that was read"
    assert result.peer_lost


@pytest.mark.parametrize("slot", [SLOTS, 2**40])
def test_a_slot_that_does_not_exist_is_a_failure_and_nothing_is_read(reader, slot):
    reader.submit("load", "P", large.span(1), large.FORWARD, large.FORWARD, LeaseWord(slot, 0, 1))
    assert f"lease slot {slot} does not exist, the peer has {SLOTS}" in reader.result("load").failure
    assert reader.agent.posted == 0


def test_a_word_of_an_earlier_read_is_not_taken_for_an_answer(world, producer):
    reader = world.reader(large.RANK, in_flight=1)
    reader.thread.connect("P", producer.cards)
    seen, landing = [], memory(reader.agent.regions[-1]).view(np.uint64)
    reader.agent.before_read = lambda _: seen.append(int(landing[0]))
    for key in ("first", "second"):
        reader.submit(key, "P", large.span(1), large.FORWARD, large.FORWARD)
        assert reader.result(key).failure is None
    _, before_first_word, left_by_first, before_second_word = seen
    assert left_by_first == LeaseWord(0, 0, 1).word(INCARNATION)
    assert left_by_first not in (before_first_word, before_second_word)
