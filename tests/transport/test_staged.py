"""Packed on the way, over NIXL between two processes; by sources with little room, that lie, stop, die."""

from __future__ import annotations

import signal
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvferry.geometry import GroupKind
from kvferry.planning.select import LoadSpan
from kvferry.planning.strategy import Strategy
from kvferry.transport import packed_read
from kvferry.transport.gather_client import GatherClient
from kvferry.transport.gather_messages import Gathered
from kvferry.transport.lease import LeaseWord
from kvferry.transport.settings import TransferSettings
from support.engines import EngineSpec, Family, GroupSpec, Interior, Stored, ranks
from support.oracle import expect
from transport.memory import scattered_tables

MIB = 1 << 20
FAMILIES = (Family(GroupKind.FULL, fields=tuple(Stored(name, 2, 4, (("content", 512),)) for name in "kv")),)
BLOCKS = 140
TOKENS = 128 * 16
SPAN = LoadSpan(0, TOKENS, TOKENS)
PATIENCE = 30.0


def spec(layout: str) -> EngineSpec:
    """Blocks of 128 KiB, in which heads or tokens come first."""
    return EngineSpec(1, (1,), (GroupSpec(GroupKind.FULL, 0, (0,), 16),), layout, Interior(), BLOCKS)


SRC, DST = spec("LBNHC"), spec("LBHNC")
(SOURCE,), (RANK,) = ranks(SRC, FAMILIES), ranks(DST, FAMILIES)
FROM, INTO = scattered_tables(SRC, TOKENS, 1), scattered_tables(DST, TOKENS, 2)
PACKED = [Strategy.STAGED, Strategy.OVER_READ]


def settings(strategy: Strategy | None = Strategy.STAGED, staging: int = 2 * MIB) -> TransferSettings:
    return TransferSettings(strategy, staging_bytes=staging, lanes=1)


def part(number: int, blocks: int = 16) -> tuple[np.ndarray, ...]:
    return (INTO[0][number * blocks : (number + 1) * blocks],)


def right(reader, tables, tokens: int) -> None:
    """The first tokens are in these blocks, and whatever else is as it was."""
    span = LoadSpan(0, tokens, tokens)
    expect(reader.rank, [SOURCE], [span], tables, reader.before).check(reader.memory.bytes)


@pytest.fixture
def answers(monkeypatch):
    """What sources have answered, with a hook that is called before a reader hears it."""
    found = []
    answer = GatherClient.answer

    def noting(self, chunk):
        reply = answer(self, chunk)
        if reply is not None:
            for hook in hooks:
                hook(reply)
            found.append(reply)
        return reply

    hooks = []
    monkeypatch.setattr(GatherClient, "answer", noting)
    noting.found, noting.hooks = found, hooks
    return noting


@pytest.fixture
def make_producer(world):
    def make(own: bool = False):
        return (world.producer if own else world.shared_producer)(SRC, FAMILIES, FROM)

    return make


@pytest.mark.parametrize("strategy", PACKED)
def test_a_prompt_larger_than_the_area_comes_in_many_chunks(world, make_producer, answers, strategy):
    reader = world.reader(RANK, settings=settings(strategy))
    producer = world.shared_producer(SRC, FAMILIES, FROM, settings=settings())
    reader.thread.connect("P", producer.cards)
    reader.submit("load", "P", SPAN, FROM, INTO)
    result = reader.result("load")
    assert result.failure is None, result.failure
    right(reader, INTO, TOKENS)
    assert len(answers.found) >= (8 if strategy is Strategy.STAGED else 0)
    assert all(isinstance(reply, Gathered) for reply in answers.found)
    assert not any(reader.thread._lanes[0]._images._taken)


@pytest.mark.parametrize("theirs", [MIB, 64 * MIB])
@pytest.mark.parametrize("strategy", PACKED)
def test_reads_that_share_a_small_area_all_end_right(world, strategy, theirs):
    reader = world.reader(RANK, settings=settings(strategy, MIB))
    producer = world.shared_producer(SRC, FAMILIES, FROM, settings=settings(staging=theirs))
    reader.thread.connect("P", producer.cards)
    for number in range(8):
        reader.submit(f"load {number}", "P", LoadSpan(0, 256, 256), FROM, part(number))
    after = reader.before
    for number in range(8):
        assert reader.result(f"load {number}").failure is None
        after = expect(reader.rank, [SOURCE], [LoadSpan(0, 256, 256)], part(number), after).value
    assert (reader.memory.bytes == after).all()


def test_a_peer_that_does_not_gather_is_read_from_directly(world, make_producer, answers):
    (card,) = make_producer().cards
    reader = world.reader(RANK, settings=settings())
    reader.thread.connect("P", [msgspec.structs.replace(card, outgoing=None)])
    reader.submit("load", "P", LoadSpan(0, 256, 256), FROM, part(0))
    assert reader.result("load").failure is None
    right(reader, part(0), 256)
    assert answers.found == []


def test_a_peer_that_would_have_to_gather_and_does_not_is_a_failure_in_words(
    world, make_producer, monkeypatch
):
    monkeypatch.setattr("kvferry.planning.strategy.MAX_RUNS", 1)
    monkeypatch.setattr("kvferry.planning.strategy._fetch_image", lambda *_: None)
    (card,) = make_producer().cards
    reader = world.reader(RANK, settings=settings())
    reader.thread.connect("P", [msgspec.structs.replace(card, outgoing=None)])
    reader.submit("load", "P", SPAN, FROM, INTO)
    assert (
        "can only move staged, and the peer does not gather; set staging_mib" in reader.result("load").failure
    )


def test_a_gather_port_where_nobody_listens_costs_patience_once_and_the_bytes_come(
    world, make_producer, monkeypatch
):
    monkeypatch.setattr(packed_read, "ASK_SECONDS", 0.5)
    asked, ask = [], GatherClient.ask
    monkeypatch.setattr(GatherClient, "ask", lambda self, *chunk: asked.append(chunk) or ask(self, *chunk))
    (card,) = make_producer().cards
    lost = msgspec.structs.replace(card.outgoing, port=1)
    reader = world.reader(RANK, settings=settings())
    reader.thread.connect("P", [msgspec.structs.replace(card, outgoing=lost)])
    for key in ("first", "second"):
        reader.submit(key, "P", SPAN, FROM, INTO)
        assert reader.result(key).failure is None
        assert (asked == []) == (key == "second"), "what has not answered is asked again"
        asked.clear()
    right(reader, INTO, TOKENS)


def test_a_source_that_stops_holds_up_nobody_and_its_reads_end_once_it_goes_on(
    over_tcp, world, make_producer, monkeypatch
):
    monkeypatch.setattr(packed_read, "ASK_SECONDS", 0.5)
    reader = world.reader(RANK, settings=settings())
    stopped, well = (world.producer(SRC, FAMILIES, FROM) for _ in range(2))
    reader.thread.connect("stopped", stopped.cards)
    reader.thread.connect("well", well.cards)
    reader.submit("before", "stopped", LoadSpan(0, 16, 16), FROM, part(0, 1))
    assert reader.result("before").failure is None
    stopped.signal(signal.SIGSTOP)
    reader.submit("given up", "stopped", LoadSpan(0, 256, 256), FROM, part(1))
    reader.submit("other", "well", LoadSpan(0, 256, 256), FROM, part(2))
    assert reader.result("other").failure is None
    reader.until(lambda: reader.agent.held["reads"] > 0)
    assert reader.result("given up", 1.0) is None
    # Its deadline has passed for the engine; its blocks are still the transfer's, until there is a result.
    assert reader.agent.held["reads"] > 0
    stopped.signal(signal.SIGCONT)
    assert reader.result("given up", PATIENCE).failure is None
    reader.submit("after", "stopped", LoadSpan(0, 256, 256), FROM, part(3))
    assert reader.result("after", PATIENCE).failure is None
    assert reader.result("given up", 0.2) is reader.result("given up"), "one result"


def test_a_source_killed_between_gathering_and_reading_is_a_failure(over_tcp, world, make_producer, answers):
    reader = world.reader(RANK, settings=settings())
    producer = make_producer(own=True)
    reader.thread.connect("P", producer.cards)
    answers.hooks.append(lambda _: producer.process.poll() is None and producer.signal(signal.SIGKILL))
    reader.submit("load", "P", SPAN, FROM, INTO)
    result = reader.result("load", PATIENCE)
    assert result is not None, "a dead peer's read never ends"
    assert result.failure is not None
    assert not any(reader.thread._lanes[0]._images._taken)
    answers.hooks.clear()
    reader.thread.connect("well", make_producer().cards)
    reader.submit("well", "well", LoadSpan(0, 256, 256), FROM, part(0))
    assert reader.result("well").failure is None


def test_a_lease_that_ends_while_chunks_are_under_way_is_a_failure(world, make_producer, answers):
    reader = world.reader(RANK, settings=settings())
    producer = make_producer()
    reader.thread.connect("P", producer.cards)

    def ending(_):
        if len(answers.found) == 2:
            producer.tell("end", [0])
            producer.tell("zero")

    answers.hooks.append(ending)
    reader.submit("load", "P", SPAN, FROM, INTO)
    assert "gave the blocks back before they were read" in reader.result("load").failure


def test_a_lot_that_was_reclaimed_before_it_was_read_is_a_failure(world, make_producer, answers):
    reader = world.reader(RANK, settings=settings())
    producer = make_producer()
    reader.thread.connect("P", producer.cards)
    answers.hooks.append(lambda reply: producer.tell("end", [reply.word]) if not answers.found else None)
    reader.submit("load", "P", SPAN, FROM, INTO)
    assert "used its staging area for others" in reader.result("load").failure
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
    reader.thread.close()
    assert reader.agent.held == {"peers": 0, "lists": 0, "reads": 0, "regions": 0}
    assert reader.thread._lanes[0]._context.closed
    assert reader.thread._exposed._gatherer is None
    assert not reader.thread._lanes[0]._thread.is_alive()
