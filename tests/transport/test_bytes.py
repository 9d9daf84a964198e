"""A sample of engines that differ, over NIXL between two processes: all bytes of the reader's memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvferry.geometry import GroupKind
from kvferry.planning.select import LoadSpan
from kvferry.planning.strategy import Strategy
from kvferry.transport.costs import TransferSettings
from support.engines import EngineSpec, Family, GroupSpec, Interior, Stored, ranks
from support.oracle import expect
from support.waiting import wait_for
from transport.memory import scattered_tables

FULL, SLIDING, STATE = GroupKind.FULL, GroupKind.SLIDING, GroupKind.STATE
KV = (Stored("k", 2, 4, (("content", 8),)), Stored("v", 2, 4, (("content", 8),)))
DENSE = (Family(FULL, fields=KV),) * 3
LATENT = (Family(GroupKind.MLA, fields=(Stored("latent", 2, 0, (("content", 24),)),)),) * 3
HYBRID = (
    Family(FULL, fields=KV),
    Family(SLIDING, 24, KV),
    Family(STATE, fields=(Stored("ssm", 4, 4, (("row", 3),)), Stored("conv.x", 2, 4, (("width", 3),)))),
)
PACKED, PLANES = Interior(), Interior(planes=True, transposed=frozenset({"k"}))


def dense(
    tp: int = 1,
    block: int = 16,
    layout: str = "LBHNC",
    interior: Interior = PACKED,
    stages: tuple[int, ...] = (3,),
    kernels: int = 1,
    kind: GroupKind = FULL,
    turns: tuple[int, int] = (1, 1),
    pcp: int = 1,
) -> EngineSpec:
    group = GroupSpec(kind, 0, (0, 1, 2), block // kernels, kernels, turns)
    return EngineSpec(tp, stages, (group,), layout, interior, 40, pcp=pcp)


def hybrid(
    tp: int = 1, block: int = 16, layout: str = "LBHNC", turns: tuple[int, int] = (1, 1)
) -> EngineSpec:
    groups = (
        GroupSpec(FULL, 0, (0,), block, turns=turns),
        GroupSpec(SLIDING, 24, (1,), block),
        GroupSpec(STATE, 0, (2,), block),
    )
    return EngineSpec(tp, (3,), groups, layout, PACKED, 60)


@dataclass(frozen=True)
class Case:
    families: tuple[Family, ...]
    src: EngineSpec
    dst: EngineSpec
    total: int = 200
    local_tokens: int = 0


CASES = {
    "alike, scattered": Case(DENSE, dense(), dense()),
    "alike, part of the prompt is there": Case(DENSE, dense(), dense(), local_tokens=64),
    "alike, one token": Case(DENSE, dense(), dense(), total=1),
    "alike, hybrid": Case(HYBRID, hybrid(), hybrid()),
    "latent": Case(LATENT, dense(2, kind=GroupKind.MLA), dense(1, kind=GroupKind.MLA)),
    "TP 2 to 1": Case(DENSE, dense(2), dense(1)),
    "TP 1 to 2": Case(DENSE, dense(1), dense(2)),
    "TP 4 to 2, hybrid": Case(HYBRID, hybrid(4), hybrid(2)),
    "TP 8 to 1, heads replicated": Case(DENSE, dense(8), dense(1)),
    "PP 2 to 1": Case(DENSE, dense(stages=(1, 2)), dense()),
    "block 32 to 16": Case(DENSE, dense(block=32), dense(block=16)),
    "block 16 to 32": Case(DENSE, dense(block=16), dense(block=32)),
    "block 24 to 16": Case(DENSE, dense(block=24), dense(block=16)),
    "block 784 to 400": Case(DENSE, dense(block=784), dense(block=400), total=1700),
    "block 400 to 784, kernel blocks of 16, TP 1 to 2": Case(
        DENSE, dense(block=400, kernels=25), dense(2, block=784, kernels=49), total=1700, local_tokens=784
    ),
    "block 528 to 1056, K transposed, kernel blocks of 16 and 32": Case(
        DENSE,
        dense(block=528, kernels=33, interior=PLANES),
        dense(block=1056, kernels=33, interior=PLANES),
        total=1200,
    ),
    "block 1056 to 2096, hybrid, TP 2 to 1": Case(HYBRID, hybrid(2, 1056), hybrid(1, 2096), total=2200),
    "block 32 of two kernel blocks to 16": Case(DENSE, dense(block=32, kernels=2), dense(block=16)),
    "layout LBHNC to BLHNC": Case(DENSE, dense(), dense(layout="BLHNC")),
    "layout BHLNC to LBNHC": Case(DENSE, dense(layout="BHLNC"), dense(layout="LBNHC")),
    "K transposed on one side": Case(DENSE, dense(), dense(interior=PLANES), total=40),
    "everything differs": Case(HYBRID, hybrid(4, 32, "BLHNC"), hybrid(1, 16, "LBNHC"), total=150),
    # Context parallelism: ranks that take turns of so many tokens.
    "latent, DCP 2 by 1 token to TP 1": Case(
        LATENT, dense(2, kind=GroupKind.MLA, turns=(2, 1)), dense(1, kind=GroupKind.MLA)
    ),
    "latent, TP 2 to DCP 4 by 16 tokens": Case(
        LATENT,
        dense(2, kind=GroupKind.MLA),
        dense(4, 32, kind=GroupKind.MLA, turns=(4, 16)),
        local_tokens=128,
    ),
    "latent, DCP 2 by 8 tokens to DCP 4 by 16": Case(
        LATENT,
        dense(2, 16, "BLHNC", kind=GroupKind.MLA, turns=(2, 8)),
        dense(2, 32, kind=GroupKind.MLA, turns=(4, 16), pcp=2),
    ),
    "DCP 2 of TP 8 by 1 token to TP 2, K transposed": Case(
        DENSE, dense(8, turns=(2, 1)), dense(2, 24, interior=PLANES), total=90
    ),
    "hybrid, DCP 2 of TP 8 by 16 tokens to TP 2, block 32": Case(
        HYBRID, hybrid(8, turns=(2, 16)), hybrid(2, 32), total=150
    ),
    "hybrid, TP 2 to DCP 2 of TP 8 by 16 tokens": Case(
        HYBRID, hybrid(2), hybrid(8, turns=(2, 16)), total=150
    ),
}


# One witness of each direction, kind of layout and family, and of each strategy where everything differs. The
# tests of planning compare plans of all pairs, and unit tests of transfers move their bytes in one process.
SHORT = {
    ("alike, scattered", None),
    ("alike, part of the prompt is there", None),
    ("alike, hybrid", Strategy.DIRECT),
    ("latent", None),
    ("TP 2 to 1", Strategy.OVER_READ),
    ("TP 1 to 2", Strategy.STAGED),
    ("TP 4 to 2, hybrid", Strategy.STAGED),
    ("PP 2 to 1", Strategy.DIRECT),
    ("block 24 to 16", None),
    ("block 528 to 1056, K transposed, kernel blocks of 16 and 32", Strategy.OVER_READ),
    ("K transposed on one side", Strategy.STAGED),
    *(("everything differs", strategy) for strategy in (None, *Strategy)),
    ("latent, DCP 2 by 1 token to TP 1", None),
    ("latent, DCP 2 by 8 tokens to DCP 4 by 16", Strategy.STAGED),
    ("DCP 2 of TP 8 by 1 token to TP 2, K transposed", Strategy.OVER_READ),
    ("hybrid, TP 2 to DCP 2 of TP 8 by 16 tokens", Strategy.DIRECT),
}
MATRIX = [
    pytest.param(
        CASES[name],
        strategy,
        id=f"{name}-{strategy or 'chosen'}",
        marks=() if (name, strategy) in SHORT else pytest.mark.long,
    )
    for name in CASES
    for strategy in (None, *Strategy)
]


@pytest.mark.parametrize(("case", "strategy"), MATRIX)
def test_the_bytes_read_are_the_bytes_written(world, case, strategy):
    span = LoadSpan(case.local_tokens, case.total, case.total)
    src_tables = scattered_tables(case.src, case.total, 1)
    dst_tables = scattered_tables(case.dst, case.total, 2)
    producer = world.shared_producer(case.src, case.families, src_tables)
    sources = ranks(case.src, case.families)
    assert len(producer.cards) == len(sources)
    for number, rank in enumerate(ranks(case.dst, case.families)):
        reader = world.reader(
            rank,
            settings=TransferSettings(strategy, staging_bytes=8 << 20, lanes=2, lane_bytes=1, verify=True),
        )
        reader.thread.connect("P", producer.cards)
        reader.submit(f"load {number}", "P", span, src_tables, dst_tables)
        result = reader.result(f"load {number}")
        assert result.failure is None, result.failure
        spans = [span] * len(case.dst.groups)
        expected = expect(reader.rank, sources, spans, dst_tables, reader.before, cleared=True)
        expected.check(reader.memory.bytes)
        assert sum(result.figures.bytes_by_group) > 0
        assert strategy is None or set(result.figures.strategies_by_group) == {(strategy,)}


def test_several_reads_in_flight_do_not_disturb_each_other(world):
    spec = EngineSpec(2, (3,), (GroupSpec(FULL, 0, (0, 1, 2), 16),), "LBHNC", PACKED, 90)
    tables = scattered_tables(spec, 16 * 80, 1)
    producer = world.shared_producer(spec, DENSE, tables)
    (rank,) = ranks(dense(1), DENSE)
    reader = world.reader(rank, in_flight=3)
    reader.thread.connect("P", producer.cards)
    (destination,) = scattered_tables(dense(1), 16 * 39, 2)
    # Disjoint destinations, and the same source sequence read from its start each time.
    parts = [destination[at : at + 3] for at in range(0, 39, 3)]
    reader.agent.gate.clear()
    for number, part in enumerate(parts):
        reader.submit(f"load {number}", "P", LoadSpan(0, 48, 48), tables, (part,))
    wait_for(lambda: reader.agent.posted >= 3 * 2)
    assert reader.poll("load 0") is None
    reader.agent.gate.set()
    expected = None
    for number, part in enumerate(parts):
        result = reader.result(f"load {number}")
        assert result.failure is None
        before = reader.before if expected is None else expected
        expected = expect(reader.rank, ranks(spec, DENSE), [LoadSpan(0, 48, 48)], (part,), before).value
    assert (reader.memory.bytes == expected).all()
    assert reader.agent.most_reads == 3 * 2, "no more in flight than allowed"


def test_a_prompt_that_is_there_already_is_not_read(world):
    producer = world.shared_producer(dense(), DENSE, scattered_tables(dense(), 64, 1))
    (rank,) = ranks(dense(), DENSE)
    reader = world.reader(rank)
    reader.thread.connect("P", producer.cards)
    tables = scattered_tables(dense(), 64, 2)
    reader.submit("load", "P", LoadSpan(64, 64, 65), tables, tables)
    result = reader.result("load")
    assert result.failure is None
    assert sum(result.figures.bytes_by_group) == reader.agent.posted == 0
    assert (reader.memory.bytes == reader.before).all()
