"""Replays of engines that read each other's host memory.

`test_oracle` compares them with the code that serves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import StringIO

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from rich.console import Console

from kvferry.tools.replay.engine import Hit
from kvferry.tools.replay.settings import BlockPool, ServedModel
from kvferry.tools.replay.show import Outcome, as_json, show
from kvferry.tools.replay.simulation import Simulation, route_named
from kvferry.tools.report import Report
from support.examples import examples
from support.small_replays import RECURRENT, UNIT, model, prompt, simulation

ENGINES, CHUNKS_PER_UNIT = 3, 2
MOST_UNITS = 5

Units = tuple[int, ...]


@st.composite
def prompts(draw: st.DrawFn) -> list[tuple[Units, int]]:
    """Prompts that continue or branch off from earlier ones, each with the number of its engine."""
    seen: list[Units] = [()]
    made = []
    for number in range(draw(st.integers(2, 20))):
        base = draw(st.sampled_from(seen))
        kept = base[: draw(st.integers(0, len(base)))]
        new = range(100 * number, 100 * number + draw(st.integers(not kept, 2)))
        seen.append((*kept, *new)[:MOST_UNITS])
        made.append((seen[-1], draw(st.integers(0, ENGINES - 1))))
    return made


def replayed(
    made: Sequence[tuple[Units, int]], *tiers: str, of: ServedModel | None = None, **settings: object
) -> tuple[Simulation, list[Hit]]:
    """Replay prompts on given engines. Return the replay, and what each prompt found."""
    found: list[Hit] = []
    replay = simulation(*tiers, of=of, engines=ENGINES, on_hit=lambda _, hit: found.append(hit), **settings)
    engines = iter([engine for _, engine in made])
    replay._route = lambda *_: next(engines)
    replay.run([prompt(len(units) * UNIT, *units) for units, _ in made])
    return replay, found


def expected(made: Sequence[tuple[Units, int]], capacity: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the chunks that each prompt finds in its engine and in others, and the chunks that each holds.

    An engine holds the chunks of its latest prompts, the first chunk of a prompt as its latest used.
    """
    held: list[list[tuple[Units, int]]] = [[] for _ in range(ENGINES)]
    found = []
    for units, engine in made:
        chunks = [(units[: n + 1], half) for n in range(len(units)) for half in range(CHUNKS_PER_UNIT)]
        own = others = 0
        for chunk in chunks:
            if chunk in held[engine]:
                own += 1
            elif any(chunk in each for each in held):
                others += 1
            else:
                break
        found.append((own, others))
        held[engine] = [*chunks, *(one for one in held[engine] if one not in chunks)][:capacity]
    return found, list(map(len, held))


@given(made=prompts(), room=st.integers(0, 30))
@examples(60)
def test_prompts_find_what_their_engine_and_the_others_hold(made: list[tuple[Units, int]], room: int) -> None:
    dense, capacity = model(), MOST_UNITS * CHUNKS_PER_UNIT + room
    chunk = dense.groups[0].chunk_bytes
    replay, hits = replayed(made, f"host={capacity * chunk}B", "fleet", of=dense)
    found, held = expected(made, capacity)
    per_chunk = UNIT // CHUNKS_PER_UNIT
    assert [hit.tier_tokens for hit in hits] == [(own * per_chunk, more * per_chunk) for own, more in found]
    assert [len(engine.tiers.tiers[0].held) for engine in replay.engines] == held
    assert replay.fleet is not None
    read = [
        sum(more for (_, more), (_, engine) in zip(found, made, strict=True) if engine == number)
        for number in range(ENGINES)
    ]
    assert replay.fleet.read_bytes == [chunks * chunk for chunks in read]
    assert sum(replay.fleet.sent_bytes) == sum(read) * chunk == replay.results.tier_bytes[1]


@given(made=prompts(), room=st.integers(0, 60))
@examples(30)
def test_fleet_knows_the_holders_of_all_chunks(made: list[tuple[Units, int]], room: int) -> None:
    of = model(RECURRENT, step_tokens=1024, retention=None)
    sizes = sum(group.chunk_bytes for group in of.groups)
    replay, _ = replayed(made, f"host={(MOST_UNITS + room) * sizes}B", "fleet", of=of)
    holders: dict[bytes, set[int]] = {}
    for number, engine in enumerate(replay.engines):
        for key in engine.tiers.tiers[0].held:
            holders.setdefault(key, set()).add(number)
    assert replay.fleet is not None
    assert {key: set(some) for key, some in replay.fleet.holders.items()} == holders
    assert all(len(set(some)) == len(some) for some in replay.fleet.holders.values())


def test_a_chunk_is_read_from_an_engine_that_holds_it() -> None:
    made = [((1, 2), 0), ((1, 2), 1), ((1, 3), 2)]
    replay, hits = replayed(made, "host=unlimited", "fleet")
    chunk = replay.model.groups[0].chunk_bytes
    assert [hit.tier_tokens for hit in hits] == [(0, 0), (0, 1024), (0, 512)]
    assert replay.fleet is not None
    assert replay.fleet.read_bytes == [0, 4 * chunk, 2 * chunk]
    first, second, third = replay.fleet.sent_bytes
    assert (first + second, third) == (6 * chunk, 0)
    assert first >= 4 * chunk, "the second prompt was read from the only holder"


def test_engines_that_have_the_same_chunk_share_the_readers() -> None:
    made = [((1,), 0), ((1,), 1)]
    replay, _ = replayed(made, "host=unlimited", "fleet")
    assert replay.fleet is not None
    for _ in range(100):
        replay.fleet.count_reads(2, list(replay.fleet.holders), 1)
    first, second, third = replay.fleet.sent_bytes
    assert third == 0
    assert min(first - 2 * replay.model.groups[0].chunk_bytes, second) > 50


@pytest.mark.parametrize("blocks", [0, 100, 1000])
@given(made=prompts(), room=st.integers(0, 30))
@example(made=[((1, 2, 3), 0), ((1, 2, 3), 1), ((4, 5, 6, 7, 8), 0), ((1, 2, 3), 1)], room=0)
@examples(30)
def test_no_prompt_of_a_dense_model_finds_less_with_the_memory_of_others(
    made: list[tuple[Units, int]], room: int, blocks: int
) -> None:
    # An engine has the chunks of a prompt afterwards, whether it has read or computed them. So its own memory
    # is the same as without a fleet.
    dense = model()
    host = f"host={(MOST_UNITS * CHUNKS_PER_UNIT + room) * dense.groups[0].chunk_bytes}B"
    _, alone = replayed(made, host, of=dense, pool=BlockPool(blocks))
    _, together = replayed(made, host, "fleet", of=dense, pool=BlockPool(blocks))
    for without, hit in zip(alone, together, strict=True):
        assert hit.local_tokens == without.local_tokens
        assert hit.found >= without.found


def test_a_prompt_of_a_recurrent_model_may_find_less_because_an_earlier_one_found_more() -> None:
    # A load moves the positions at which an engine takes snapshots, so a later prompt may part before one.
    of = model(RECURRENT, step_tokens=1024, retention=None)
    made = [((1, 2, 3, 4), 0), ((1, 2, 5, 6, 7, 8), 1), ((1, 2, 5, 9), 1)]
    _, alone = replayed(made, "host=unlimited", of=of)
    _, together = replayed(made, "host=unlimited", "fleet", of=of)
    assert [hit.found for hit in alone] == [0, 0, 1040]
    assert [hit.found for hit in together] == [0, 960, 960]


@pytest.mark.parametrize(
    ("of", "chunks"),
    [(model(), 8), (model(RECURRENT, step_tokens=1024, retention=None), 60)],
    ids=["dense", "recurrent"],
)
def test_a_fleet_of_one_engine_is_an_engine_alone(of: ServedModel, chunks: int) -> None:
    host = f"host={chunks * of.groups[0].chunk_bytes}B"
    served = [(1, 2, 3), (1, 2, 4), (5, 6, 7), (8, 9, 0)] * 3
    requests = [prompt(len(units) * UNIT, *units) for units in served]
    for slow in ((), ("file=unlimited",)):
        outcomes = []
        for tiers in ((host, *slow), (host, "fleet", *slow)):
            replay = simulation(*tiers, of=of, pool=BlockPool(50), prefill_tokens_per_second=1000)
            replay.run(requests)
            found = as_json(Outcome(replay.replayed(), "trace", complete=True))
            outcomes.append(found | {"tiers": [tier for tier in found["tiers"] if tier["name"] != "fleet"]})
        assert outcomes[0] == outcomes[1]
    assert outcomes[0]["local_tokens"] > 0
    assert all(tier["hit_tokens"] > 0 for tier in outcomes[0]["tiers"])


def test_other_engines_come_before_a_slower_store_and_after_a_faster_one() -> None:
    made = [((1, 2), 0), ((1, 2), 1)]
    _, (_, hit) = replayed(made, "host=unlimited", "fleet", "object=unlimited")
    assert hit.tier_tokens == (0, 1024, 0)
    _, (_, hit) = replayed(made, "host=unlimited", "object=unlimited", "fleet")
    assert hit.tier_tokens == (0, 1024, 0), "of the store"


def test_chunks_of_other_engines_take_the_time_of_their_tier() -> None:
    first, second = prompt(1024, 1, 2, session="a"), prompt(1024, 1, 2, at=2.0, session="b")
    slow = simulation(
        "host=unlimited", "fleet", engines=2, route="least-busy", prefill_tokens_per_second=1024
    )
    results = slow.run([first, second])
    assert results.tier_tokens == [0, 1024]
    seconds = results.tier_bytes[1] / 10e9 + 1 / 1024
    assert results.waits.mean == pytest.approx((1 + seconds) / 2)


def test_the_least_busy_engine_has_the_shortest_queue_and_then_the_fewest_tokens() -> None:
    route, idle = route_named("least-busy", 3, 0), np.zeros(3, np.int64)
    long, short = prompt(1024, 1, 2), prompt(UNIT, 3)
    assert [route(one, idle) for one in (long, short, short, short)] == [0, 1, 2, 1]
    assert route(short, np.array([2, 5, 4])) == 0


def test_an_engine_whose_requests_have_ended_has_no_queue() -> None:
    later = [prompt(UNIT, n, at=10.0 * n) for n in (5, 6, 7)]
    replay = simulation(engines=2, route="least-busy", prefill_tokens_per_second=1024)
    replay.run([prompt(4 * UNIT, 1, 2, 3, 4), prompt(UNIT, 9), *later])
    assert [engine.requests for engine in replay.engines] == [1, 4], "the first has had more tokens"


def test_the_spread_over_engines_fits_a_terminal_and_json() -> None:
    made = [((1, 2), 0), ((1, 2), 1), ((1, 3), 1)]
    replay, _ = replayed(made, "host=unlimited", "fleet")
    found = Outcome(replay.replayed(), "trace.jsonl", complete=True)
    for width in (40, 80):
        text = StringIO()
        show(found, Report(Console(file=text, width=width), width))
        assert max(map(len, text.getvalue().splitlines())) <= width
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert ["requests", "0", "1", "2"] in lines
    assert ["tokens", "not", "computed", "0.0%", "0.0%", "75.0%"] in lines
    size = replay.results.tier_bytes[1]
    assert size == 4 * replay.model.groups[0].chunk_bytes
    values = json.loads(json.dumps(as_json(found)))
    assert [one["requests"] for one in values["by_engine"]] == [1, 2, 0]
    assert [one["hit_tokens"] for one in values["by_engine"]] == [0, 1536, 0]
    assert [one["read_bytes"] for one in values["by_engine"]] == [0, size, 0]
    assert [one["sent_bytes"] for one in values["by_engine"]] == [size, 0, 0]
    (fleet,) = (tier for tier in values["tiers"] if tier["name"] == "fleet")
    assert (fleet["hit_tokens"], fleet["read_bytes"], fleet["capacity_bytes"]) == (1024, size, 0)
