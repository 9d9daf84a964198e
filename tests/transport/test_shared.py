"""KV through host memory that two processes of one machine map, while the transport carries a word only."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from kvferry.geometry import GroupKind
from kvferry.planning.select import LoadSpan
from kvferry.planning.strategy import Strategy
from kvferry.transport.settings import TransferSettings
from support.engines import EngineSpec, Family, GroupSpec, Interior, Stored, ranks
from support.oracle import expect
from transport.memory import scattered_tables

FAMILIES = (Family(GroupKind.FULL, fields=tuple(Stored(name, 2, 4, (("content", 512),)) for name in "kv")),)
TOKENS = 64 * 16
SPAN = LoadSpan(0, TOKENS, TOKENS)
SPEC = EngineSpec(1, (1,), (GroupSpec(GroupKind.FULL, 0, (0,), 16),), "LBHNC", Interior(), 76)
(RANK,) = ranks(SPEC, FAMILIES)
FROM, INTO = scattered_tables(SPEC, TOKENS, 1), scattered_tables(SPEC, TOKENS, 2)
SHARED = TransferSettings(Strategy.SHARED, staging_bytes=1 << 20, lanes=1)


def test_bytes_come_through_an_area_smaller_than_the_prompt(world, over_tcp):
    reader = world.reader(RANK, settings=SHARED)
    producer = world.producer(SPEC, FAMILIES, FROM)
    reader.thread.connect("P", producer.cards)
    reader.submit("load", "P", SPAN, FROM, INTO)
    result = reader.result("load")
    assert result.failure is None, result.failure
    assert result.plan.strategy_by_group == ("shared",)
    expect(reader.rank, [RANK], [SPAN], INTO, reader.before).check(reader.memory.bytes)


def test_a_lease_that_ended_meanwhile_is_noticed(world):
    reader = world.reader(RANK, settings=SHARED)
    producer = world.producer(SPEC, FAMILIES, FROM)
    reader.thread.connect("P", producer.cards)
    producer.tell("end", [0])
    reader.submit("load", "P", SPAN, FROM, INTO)
    assert "lease" in reader.result("load").failure


def test_the_first_load_over_tcp_is_shared_already(world, over_tcp):
    reader = world.reader(RANK)
    producer = world.producer(SPEC, FAMILIES, FROM)
    reader.thread.connect("P", producer.cards)
    reader.submit("load", "P", SPAN, FROM, INTO)
    result = reader.result("load")
    assert result.failure is None, result.failure
    assert (result.plan.strategy_by_group, result.plan.not_shared) == (("shared",), "")
    assert 1e6 < result.plan.bytes_per_second < 5e9
    expect(reader.rank, [RANK], [SPAN], INTO, reader.before).check(reader.memory.bytes)


def test_memory_that_cannot_be_mapped_leaves_reads_and_the_plan_says_why(world, over_tcp):
    reader = world.reader(RANK)
    producer = world.producer(SPEC, FAMILIES, FROM)
    (card,) = producer.cards
    gone = replace(card.outgoing.file, fd=4000)
    outgoing = structs.replace(card.outgoing, file=gone)
    reader.thread.connect("P", [structs.replace(card, outgoing=outgoing)])
    reader.submit("load", "P", SPAN, FROM, INTO)
    result = reader.result("load")
    assert result.failure is None, result.failure
    assert result.plan.strategy_by_group == ("direct",)
    assert "no shared memory at /proc/" in result.plan.not_shared
    expect(reader.rank, [RANK], [SPAN], INTO, reader.before).check(reader.memory.bytes)
