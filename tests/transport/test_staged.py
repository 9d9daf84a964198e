"""Packed on the way, over NIXL between two processes; by sources with little room, that lie, stop, die."""

from __future__ import annotations

import errno
import signal
import socket
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvferry.geometry import GroupKind
from kvferry.planning.select import LoadSpan
from kvferry.planning.strategy import Strategy
from kvferry.transport.costs import TransferSettings
from kvferry.transport.lease import LeaseWord
from kvferry.transport.read_plan import Report
from kvferry.transport.segmented_read import ASK_SECONDS
from support.clock import Clock
from support.engines import EngineSpec, Family, GroupSpec, Interior, Stored, ranks
from support.oracle import expect
from support.waiting import wait_for
from transport.memory import scattered_tables
from transport.producer import SLOTS

MIB = 1 << 20
FAMILIES = (Family(GroupKind.FULL, fields=tuple(Stored(name, 2, 4, (("content", 512),)) for name in "kv")),)
BLOCKS = 76
TOKENS = 64 * 16
SPAN = LoadSpan(0, TOKENS, TOKENS)


def spec(layout: str) -> EngineSpec:
    """Blocks of 128 KiB, in which heads or tokens come first."""
    return EngineSpec(1, (1,), (GroupSpec(GroupKind.FULL, 0, (0,), 16),), layout, Interior(), BLOCKS)


SRC, DST = spec("LBNHC"), spec("LBHNC")
(SOURCE,), (RANK,) = ranks(SRC, FAMILIES), ranks(DST, FAMILIES)
FROM, INTO = scattered_tables(SRC, TOKENS, 1), scattered_tables(DST, TOKENS, 2)
PACKED = [Strategy.STAGED, Strategy.OVER_READ]


def settings(strategy: Strategy | None = Strategy.STAGED, staging: int = MIB) -> TransferSettings:
    return TransferSettings(strategy, staging_bytes=staging, lanes=1)


def part(number: int, blocks: int = 16) -> tuple[np.ndarray, ...]:
    return (INTO[0][number * blocks : (number + 1) * blocks],)


def right(reader, tables, tokens: int) -> None:
    """The first tokens are in these blocks, and whatever else is as it was."""
    span = LoadSpan(0, tokens, tokens)
    expect(reader.rank, [SOURCE], [span], tables, reader.before).check(reader.memory.bytes)


@pytest.fixture
def make_producer(world):
    def make(own: bool = False):
        return (world.producer if own else world.shared_producer)(SRC, FAMILIES, FROM)

    return make


@pytest.mark.parametrize("strategy", PACKED)
def test_a_prompt_larger_than_the_area_comes_in_many_chunks(world, strategy):
    reader = world.reader(RANK, settings=settings(strategy))
    producer = world.shared_producer(SRC, FAMILIES, FROM, settings=settings())
    reader.thread.connect("P", producer.cards)
    reader.submit("load", "P", SPAN, FROM, INTO)
    result = reader.result("load")
    assert result.failure is None, result.failure
    right(reader, INTO, TOKENS)
    # A READ for the images of each chunk. Staged, one for the word that guards them, too.
    assert reader.agent.made >= (16 if strategy is Strategy.STAGED else 8)
    assert reader.thread.landing.used_units == 0


@pytest.mark.parametrize("theirs", [MIB, pytest.param(64 * MIB, marks=pytest.mark.long)])
@pytest.mark.parametrize("strategy", PACKED)
def test_reads_that_share_a_small_area_all_end_right(world, strategy, theirs):
    reader = world.reader(RANK, settings=settings(strategy, MIB))
    producer = world.shared_producer(SRC, FAMILIES, FROM, settings=settings(staging=theirs))
    reader.thread.connect("P", producer.cards)
    for number in range(4):
        reader.submit(f"load {number}", "P", LoadSpan(0, 256, 256), FROM, part(number))
    after = reader.before
    for number in range(4):
        assert reader.result(f"load {number}").failure is None
        after = expect(reader.rank, [SOURCE], [LoadSpan(0, 256, 256)], part(number), after).value
    assert (reader.memory.bytes == after).all()


def test_a_peer_that_does_not_gather_is_read_from_directly(world, make_producer):
    (card,) = make_producer().cards
    reader = world.reader(RANK, settings=settings())
    reader.thread.connect("P", [msgspec.structs.replace(card, outgoing=None)])
    reader.submit("load", "P", LoadSpan(0, 256, 256), FROM, part(0))
    assert reader.result("load").failure is None
    right(reader, part(0), 256)


def test_a_gather_port_where_nobody_listens_costs_patience_once_and_the_bytes_come(world, make_producer):
    clock = Clock()
    (card,) = make_producer().cards
    lost = msgspec.structs.replace(card.outgoing, port=1)
    reader = world.reader(RANK, settings=settings(), clock=clock)
    reader.thread.connect("P", [msgspec.structs.replace(card, outgoing=lost)])

    def ended() -> Report | None:
        clock.now += ASK_SECONDS / 4
        return reader.poll("first")

    reader.submit("first", "P", SPAN, FROM, INTO)
    assert wait_for(ended).failure is None
    assert clock.now > ASK_SECONDS, "it was asked"
    # No time passes: a second question would not be given up.
    reader.submit("second", "P", SPAN, FROM, INTO)
    assert reader.result("second").failure is None
    right(reader, INTO, TOKENS)


@pytest.mark.long
def test_a_source_that_stops_holds_up_nobody_and_its_reads_end_once_it_goes_on(
    over_tcp, world, make_producer
):
    clock = Clock()
    reader = world.reader(RANK, settings=settings(), clock=clock)
    stopped, well = (world.producer(SRC, FAMILIES, FROM) for _ in range(2))
    reader.thread.connect("stopped", stopped.cards)
    reader.thread.connect("well", well.cards)
    reader.submit("before", "stopped", LoadSpan(0, 16, 16), FROM, part(0, 1))
    assert reader.result("before").failure is None
    stopped.signal(signal.SIGSTOP)
    reader.submit("given up", "stopped", LoadSpan(0, 256, 256), FROM, part(1))
    reader.submit("other", "well", LoadSpan(0, 256, 256), FROM, part(2))
    assert reader.result("other").failure is None
    assert reader.poll("given up") is None
    clock.now += ASK_SECONDS + 1
    wait_for(lambda: reader.agent.held["reads"] > 0)
    assert reader.poll("given up") is None
    # Its deadline has passed for the engine; its blocks are still the transfer's, until there is a result.
    assert reader.agent.held["reads"] > 0
    stopped.signal(signal.SIGCONT)
    assert reader.result("given up").failure is None
    reader.submit("after", "stopped", LoadSpan(0, 256, 256), FROM, part(3))
    assert reader.result("after").failure is None


@pytest.mark.long
def test_a_source_killed_between_gathering_and_reading_is_a_failure(over_tcp, world, make_producer):
    reader = world.reader(RANK, settings=settings())
    producer = make_producer(own=True)
    reader.thread.connect("P", producer.cards)
    # All is staged, so the first READ is of gathered images.
    reader.agent.before_read = lambda number: number or producer.signal(signal.SIGKILL)
    reader.submit("load", "P", SPAN, FROM, INTO)
    assert reader.result("load").failure is not None
    assert reader.thread.landing.used_units == 0
    reader.thread.connect("well", make_producer().cards)
    reader.submit("well", "well", LoadSpan(0, 256, 256), FROM, part(0))
    assert reader.result("well").failure is None


def test_a_lease_that_ends_while_chunks_are_under_way_is_a_failure(world, make_producer):
    reader = world.reader(RANK, settings=settings())
    producer = make_producer()
    reader.thread.connect("P", producer.cards)

    def ending(number: int) -> None:
        if number == 2:
            producer.tell("end", [0])
            producer.tell("zero")

    reader.agent.before_read = ending
    reader.submit("load", "P", SPAN, FROM, INTO)
    assert "gave the blocks back before they were read" in reader.result("load").failure


def test_a_lot_that_was_reclaimed_before_it_was_read_is_a_failure(world, make_producer):
    reader = world.reader(RANK, settings=settings())
    producer = make_producer()
    reader.thread.connect("P", producer.cards)
    # The words of the staging area follow those of leases.
    reader.agent.before_read = lambda number: number or producer.tell("end", [SLOTS])
    reader.submit("load", "P", SPAN, FROM, INTO)
    assert "used its staging area for others" in reader.result("load").failure
    reader.agent.before_read = lambda number: None
    reader.submit("again", "P", SPAN, FROM, INTO)
    assert reader.result("again").failure is None
    right(reader, INTO, TOKENS)


def test_a_peer_whose_second_rank_cannot_be_prepared_leaves_nothing_behind(world, make_producer):
    two = replace(SRC, tp=2)
    tables = scattered_tables(two, 16, 1)
    first, second = world.shared_producer(two, FAMILIES, tables).cards
    reader = world.reader(RANK, settings=settings())
    for key, spoiled in {
        "metadata": msgspec.structs.replace(second, agent=b"none"),
        "words": msgspec.structs.replace(second, words_address=8),
    }.items():
        reader.thread.connect(key, [first, spoiled])
        reader.submit(key, key, LoadSpan(0, 16, 16), tables, part(0, 1))
        assert "cannot be read from" in reader.result(key).failure
        assert reader.agent.held == {"peers": 0, "lists": 0, "reads": 0, "regions": 1}
    reader.thread.connect("well", [first, second])
    reader.submit("load", "well", LoadSpan(0, 16, 16), tables, part(0, 1))
    assert reader.result("load").failure is None


def test_a_peer_that_copies_anothers_metadata_and_fails_does_not_take_the_other_along(world, make_producer):
    (card,) = make_producer().cards
    reader = world.reader(RANK, settings=settings())
    reader.thread.connect("P", [card])
    reader.submit("before", "P", LoadSpan(0, 256, 256), FROM, part(0))
    assert reader.result("before").failure is None
    reader.thread.connect("copy", [msgspec.structs.replace(card, words_address=8)])
    reader.submit("copy", "copy", LoadSpan(0, 256, 256), FROM, part(0))
    assert reader.result("copy").failure is not None
    reader.submit("after", "P", LoadSpan(0, 256, 256), FROM, part(1))
    assert reader.result("after").failure is None, reader.result("after").failure


@pytest.mark.parametrize("strategy", PACKED)
def test_closing_frees_everything(world, make_producer, strategy):
    reader = world.reader(RANK, settings=settings(strategy))
    reader.thread.connect("P", make_producer().cards)
    reader.submit("load", "P", SPAN, FROM, INTO, LeaseWord(0, 0, 1))
    assert reader.result("load").failure is None
    port = reader.thread.card.outgoing.port
    reader.thread.close()
    assert reader.agent.held == {"peers": 0, "lists": 0, "reads": 0, "regions": 0}
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
