"""Peers that lie, die or stop: the read fails alone, its memory stays owned, everyone else is served."""

from __future__ import annotations

import re
import signal
from dataclasses import replace

import numpy as np
import pytest

from kvferry.connector.loads import Loads
from kvferry.geometry import Region
from kvferry.transport.agent import ReadState
from support.clock import Clock
from support.loads import made_up_load, only_read
from support.waiting import wait_for
from transport import large
from transport.pair import Watched


def well(world, reader, name="well", make=None):
    """The reader's thread serves this peer."""
    producer = (make or world.shared_producer)(large.SPEC, large.FAMILIES, seed=50)
    reader.thread.connect(name, producer.cards)
    reader.submit(f"{name}'s", name, large.span(2), large.FORWARD, large.BACKWARD)
    result = reader.result(f"{name}'s")
    assert result.failure is None, result.failure
    found, wanted = large.pages(reader.memory.bytes), large.pages(50)
    assert (found[large.BACKWARD[0][:2]] == wanted[1:3]).all()
    return producer


@pytest.fixture(params=[False, True], ids=["busy", "idle"])
def reader(world, request):
    reader = world.reader(large.RANK)
    reader.idle = request.param
    return reader


@pytest.mark.parametrize(
    ("src", "dst", "says"),
    [
        ([1, large.BLOCKS + 1], [1, 2], rf"source's table names blocks 1 to {large.BLOCKS + 1}"),
        ([1, 2], [2**40, 2], "destination's table names blocks 2 to"),
        ([1, 0], [1, 2], "source no longer holds a block .*null block"),
        ([1], [1, 2], "source's table, which has 1"),
        ([1, -5], [1, 2], "source's table names blocks -5"),
    ],
)
def test_blocks_that_do_not_exist_are_a_failure_in_words_and_nothing_is_read(world, reader, src, dst, says):
    producer = world.shared_producer(large.SPEC, large.FAMILIES)
    reader.thread.connect("P", producer.cards)
    reader.submit("load", "P", large.span(2), [np.array(src)], [np.array(dst)])
    failure = reader.result("load").failure
    assert re.search(says, failure), failure
    assert reader.agent.posted == 0
    assert (reader.memory.bytes == reader.before).all()


def test_tables_of_another_number_of_groups_are_a_failure(world, reader):
    producer = world.shared_producer(large.SPEC, large.FAMILIES)
    reader.thread.connect("P", producer.cards)
    reader.submit("load", "P", large.span(1), large.FORWARD * 2, large.FORWARD)
    result = reader.result("load")
    assert "block tables for 2 and 1 groups, the engines have 1 and 1" in result.failure
    assert not result.peer_lost, "it is the offer that is wrong"


def test_a_peer_that_was_never_connected_is_a_failure(reader):
    reader.submit("load", "nobody", large.span(1), large.FORWARD, large.FORWARD)
    result = reader.result("load")
    assert (result.failure, result.peer_lost) == ("peer nobody is not connected", True)


def test_metadata_that_is_not_nixls_costs_that_peer_only(world, reader):
    producer = world.shared_producer(large.SPEC, large.FAMILIES)
    (card,) = producer.cards
    spoiled = {
        "empty": b"",
        "random": np.random.default_rng(1).bytes(500),
        "cut short": card.agent[: len(card.agent) // 2],
        "zeros": bytes(len(card.agent)),
    }
    for name, metadata in spoiled.items():
        reader.thread.connect(name, [type(card)(card.geometry, metadata, card.words_address, card.words, 1)])
        reader.submit(name, name, large.span(1), large.FORWARD, large.FORWARD)
        assert f"peer {name} cannot be read from" in reader.result(name).failure
    assert (reader.memory.bytes == reader.before).all()
    well(world, reader)


def test_pages_that_lie_outside_what_the_peer_registered_cost_that_peer_only(world, reader):
    producer = world.shared_producer(large.SPEC, large.FAMILIES)
    (card,) = producer.cards
    groups = card.geometry.groups
    layer = replace(groups[0].layers[0], address=8 * large.PAGE)
    elsewhere = replace(
        card.geometry,
        groups=(replace(groups[0], layers=(layer,)),),
        regions=(Region(8 * large.PAGE, 1000 * large.PAGE),),
    )
    reader.thread.connect(
        "liar", [type(card)(elsewhere, card.agent, card.words_address, card.words, card.incarnation)]
    )
    reader.submit("load", "liar", large.span(1), large.FORWARD, large.FORWARD)
    assert reader.result("load").failure is not None
    well(world, reader)


def test_words_that_lie_elsewhere_cost_that_peer_only(world, reader):
    producer = world.shared_producer(large.SPEC, large.FAMILIES)
    (card,) = producer.cards
    reader.thread.connect("liar", [type(card)(card.geometry, card.agent, 8, card.words, card.incarnation)])
    reader.submit("load", "liar", large.span(1), large.FORWARD, large.FORWARD)
    assert reader.result("load").failure is not None
    well(world, reader)


@pytest.mark.long
@pytest.mark.parametrize("transports", ["any", "tcp"])
def test_a_producer_killed_before_a_read_is_a_failure(world, transports, request):
    if transports == "tcp":
        request.getfixturevalue("over_tcp")
    reader = world.reader(large.RANK)
    producer = well(world, reader, "P", world.producer)
    producer.signal(signal.SIGKILL)
    reader.submit("load", "P", large.SPAN, large.FORWARD, large.FORWARD)
    result = reader.result("load")
    assert result.failure is not None
    assert result.peer_lost
    well(world, reader)


@pytest.mark.parametrize("transports", ["any", "tcp"])
def test_a_read_from_an_engine_that_sleeps_is_a_failure_and_touches_none_of_its_memory(
    world, transports, request
):
    if transports == "tcp":
        request.getfixturevalue("over_tcp")
    reader = world.reader(large.RANK)
    producer = well(world, reader, "P", world.producer)
    producer.tell("sleep")
    reader.submit("load", "P", large.SPAN, large.FORWARD, large.FORWARD)
    result = reader.result("load")
    assert result.failure is not None
    assert result.peer_lost
    producer.tell("end", [0])  # its process goes on


def test_a_producer_killed_in_the_middle_of_a_read_is_a_failure(over_tcp, world):
    reader = world.reader(large.RANK)
    producer = well(world, reader, "P", world.producer)
    producer.signal(signal.SIGSTOP)
    reader.submit("load", "P", large.SPAN, large.FORWARD, large.FORWARD)
    wait_for(lambda: reader.agent.held["reads"])
    assert reader.poll("load") is None
    producer.signal(signal.SIGKILL)
    result = reader.result("load")
    assert result.failure is not None
    well(world, reader)


def test_while_a_producer_is_stopped_the_deadline_passes_and_the_memory_stays_owned(over_tcp, world):
    now = 0.0
    loads = Loads(lambda: now)
    reader = world.reader(large.RANK)
    producer = well(world, reader, "P", world.producer)
    reader.memory.bytes[:] = reader.before
    producer.signal(signal.SIGSTOP)
    loads.begin(made_up_load("load", large.SPAN, large.FORWARD))
    loads.add(only_read("load"))
    reader.submit("load", "P", large.SPAN, large.FORWARD, large.FORWARD)
    wait_for(lambda: reader.agent.held["reads"])
    assert reader.poll("load") is None
    now = 31.0
    (settled,) = loads.settle()
    assert (settled.report.failure, settled.report.late) == ("its deadline passed", 1)
    assert len(loads) == 1
    assert reader.agent.held["reads"] == 1, "nothing in flight is given back"
    landed = (large.pages(reader.memory.bytes) == large.pages(50)).all(axis=1)
    assert not landed[1:].all(), "a peer that is stopped serves nothing"
    well(world, reader, "another")
    assert reader.poll("load") is None

    producer.signal(signal.SIGCONT)
    result = reader.result("load")
    assert result.failure is None
    assert (large.pages(reader.memory.bytes)[1:] == large.pages(50)[1:]).all()
    loads.on_part_ended("load", result)
    assert [one.report for one in loads.settle()] == [None]
    assert len(loads) == 0


@pytest.mark.parametrize("fails", ["the data", "the word"])
def test_a_read_that_the_transport_calls_failed_is_a_failure(world, reader, fails):
    def state(handle):
        found = Watched.state(reader.agent, handle)
        here = reader.agent.posted == (1 if fails == "the data" else 2)
        return ReadState.FAILED if found is ReadState.DONE and here else found

    producer = world.shared_producer(large.SPEC, large.FAMILIES)
    reader.thread.connect("P", producer.cards)
    reader.agent.state = state
    reader.submit("load", "P", large.span(1), large.FORWARD, large.FORWARD)
    result = reader.result("load")
    assert (result.failure, result.peer_lost) == ("the transport failed while reading", True)


def test_a_peer_is_connected_again_after_a_fault_that_passes(world):
    clock = Clock()
    reader = world.reader(large.RANK, clock=clock)
    producer, add_peer, faults = world.shared_producer(large.SPEC, large.FAMILIES), reader.agent.add_peer, 2

    def flaky(metadata):
        nonlocal faults
        if faults:
            faults -= 1
            raise RuntimeError("the network is down")
        return add_peer(metadata)

    reader.agent.add_peer = flaky
    reader.thread.connect("P", producer.cards)
    left = []
    for second in (0, 0.9, 1.1):
        clock.now = second
        name = f"load {second}"
        reader.submit(name, "P", large.span(1), large.FORWARD, large.FORWARD)
        failure = reader.result(name).failure
        assert failure is None or "the network is down" in failure
        left.append((faults, failure is None))
    assert left == [(0, False), (0, False), (0, True)], "the second failure is followed by a pause"
    assert (large.pages(reader.memory.bytes)[1:2] == large.pages(0)[1:2]).all()


def test_a_connection_that_broke_is_made_anew(world, reader):
    well(world, reader, "P")
    broken, add_peer, made = reader.agent.state, reader.agent.add_peer, list[str]()

    def adds(metadata):
        made.append("made anew")
        return add_peer(metadata)

    reader.agent.add_peer = adds
    reader.agent.state = lambda handle: (
        ReadState.FAILED if broken(handle) is ReadState.DONE else ReadState.IN_FLIGHT
    )
    reader.submit("load", "P", large.span(1), large.FORWARD, large.FORWARD)
    assert reader.result("load").peer_lost
    reader.agent.state = broken
    reader.memory.bytes[:] = reader.before
    reader.submit("again", "P", large.span(1), large.FORWARD, large.FORWARD)
    assert reader.result("again").failure is None
    assert (large.pages(reader.memory.bytes)[1] == large.pages(50)[1]).all()
    assert made == ["made anew"]
    assert reader.agent.held == {"peers": 1, "lists": 4, "reads": 0, "regions": 1}


def test_a_read_that_cannot_be_given_back_costs_nothing_else(world, reader):
    inside = reader.agent._nixl
    given_back = inside.release_xfer_handle

    def release(handle):
        given_back(handle)
        raise RuntimeError("of the transport's own making")

    inside.release_xfer_handle = release
    well(world, reader)
    well(world, reader, "again")


@pytest.mark.long
def test_a_result_comes_only_after_everything_has_landed(over_tcp, world):
    reader = world.reader(large.RANK)
    producer = world.producer(large.SPEC, large.FAMILIES, seed=50)
    reader.thread.connect("P", producer.cards)
    for attempt in range(3):
        reader.memory.bytes[:] = 0
        reader.submit(f"load {attempt}", "P", large.SPAN, large.BACKWARD, large.FORWARD)
        result = reader.result(f"load {attempt}")
        assert result.failure is None
        assert (large.pages(reader.memory.bytes)[1:] == large.pages(50)[:0:-1]).all()


def test_closing_frees_everything(world):
    reader = world.reader(large.RANK)
    well(world, reader)
    assert reader.agent.held == {"peers": 1, "lists": 4, "reads": 0, "regions": 1}
    reader.thread.close()
    assert reader.agent.held == {"peers": 0, "lists": 0, "reads": 0, "regions": 0}


def test_closing_waits_for_what_is_in_flight_and_then_leaves_it_behind(world, caplog):
    reader = world.reader(large.RANK)
    well(world, reader, "P")
    reader.agent.gate.clear()
    reader.submit("load", "P", large.span(1), large.FORWARD, large.FORWARD)
    wait_for(lambda: reader.agent.held["reads"] == 1)
    reader.thread.close(0.3)
    assert "reads have not ended 0.3 s after the engine began to stop" in caplog.text
    assert reader.agent.held["reads"] == 1
