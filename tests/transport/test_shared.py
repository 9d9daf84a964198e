"""KV through host memory that two processes of one machine map, while the transport carries a word only."""

from __future__ import annotations

from kvferry.geometry import GroupKind
from kvferry.planning.select import LoadSpan
from kvferry.transport import read_speed
from kvferry.transport.costs import TransferSettings
from support.engines import EngineSpec, Family, GroupSpec, Interior, Stored, ranks
from support.oracle import expect
from transport.memory import scattered_tables

FAMILIES = (Family(GroupKind.FULL, fields=tuple(Stored(name, 2, 4, (("content", 512),)) for name in "kv")),)
TOKENS = 64 * 16
SPAN = LoadSpan(0, TOKENS, TOKENS)
SPEC = EngineSpec(1, (1,), (GroupSpec(GroupKind.FULL, 0, (0,), 16),), "LBHNC", Interior(), 76)
(RANK,) = ranks(SPEC, FAMILIES)
FROM, INTO = scattered_tables(SPEC, TOKENS, 1), scattered_tables(SPEC, TOKENS, 2)


def test_the_first_load_over_tcp_is_shared_already(world, over_tcp, monkeypatch):
    # A busy machine may need longer for the measurement than a load of an engine waits.
    monkeypatch.setattr(read_speed, "PATIENCE_SECONDS", 60.0)
    # TCP within an idle machine takes about 8 times as long as the default costs say, just at the border.
    monkeypatch.setattr(read_speed, "NEAR", 4.0)
    reader = world.reader(RANK, settings=TransferSettings(lanes=1))
    producer = world.producer(SPEC, FAMILIES, FROM)
    reader.thread.connect("P", producer.cards)
    reader.submit("load", "P", SPAN, FROM, INTO)
    result = reader.result("load")
    assert result.failure is None, result.failure
    assert (result.figures.strategies_by_group, result.figures.not_shared) == ((("shared",),), "")
    assert 1e6 < result.figures.read_bytes_per_second < 5e9
    expect(reader.rank, [RANK], [SPAN], INTO, reader.before).check(reader.memory.bytes)
