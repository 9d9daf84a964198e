"""Replays of small traces whose outcome can be counted by hand."""

from __future__ import annotations

import json
import math
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.curve import hit_rate_curve
from kvferry.tools.replay.page import page
from kvferry.tools.replay.settings import BlockPool
from kvferry.tools.replay.show import Outcome, as_json, show
from kvferry.tools.replay.simulation import route_named
from kvferry.tools.report import Report
from support.small_replays import RECURRENT, UNIT, model, passes_over, prompt, simulation


def test_a_second_prompt_finds_the_chunks_of_the_prefix_that_it_shares() -> None:
    replay = simulation()
    results = replay.run([prompt(1400, 1, 2, 3), prompt(1300, 1, 2, 4), prompt(1400, 1, 2, 3)])
    assert results.hit_tokens == 1024 + 1400, "a part of a prompt, then all of it with its incomplete chunk"
    assert (results.unit_hits, results.units) == (2 + 3, 9)
    assert results.prompt_tokens == 4100
    [tier] = replay.tiers[0]
    assert tier.counts[0].stored == 6 + 2, (
        "6 chunks of the first prompt; 1 and an incomplete one of the second"
    )


def test_the_engines_own_prefix_comes_before_the_tiers() -> None:
    replay = simulation(pool=BlockPool(1000))
    results = replay.run([prompt(1400, 1, 2, 3), prompt(1300, 1, 2, 4)])
    assert (results.local_tokens, results.tier_tokens) == (1024, [0])


def test_an_engine_without_room_loses_its_oldest_blocks() -> None:
    # Two prompts of 64 and 82 blocks do not fit into 100 blocks together.
    requests = [prompt(1024, 1, 2), prompt(1300, 5, 6, 7), prompt(1024, 1, 2)]
    found = simulation("host=unlimited", pool=BlockPool(100)).run(requests)
    assert found.local_tokens < 1000
    assert found.hit_tokens == 1024, "host memory still has them"
    assert simulation("host=unlimited", pool=BlockPool(200)).run(requests).local_tokens == 1008


def test_a_full_host_memory_evicts_and_a_file_tier_keeps() -> None:
    chunk = model().groups[0].chunk_bytes
    requests = [prompt(1024, 1, 2), prompt(1024, 3, 4), prompt(1024, 1, 2)]
    small = f"host={4 * chunk}B"
    assert simulation(small).run(requests).hit_tokens == 0
    replay = simulation(small, "file=unlimited")
    assert replay.run(requests).tier_tokens == [0, 1024]
    assert replay.tiers[0][0].counts[0].evicted == 8
    assert replay.tiers[1][0].counts[0].read == 4


def test_chunks_can_be_found_when_their_prompt_is_computed() -> None:
    def hits(tier: str, second: float) -> int:
        first, other = prompt(1024, 1, 2, session="a"), prompt(1100, 1, 2, 3, at=second, session="b")
        replay = simulation(
            "host=unlimited", tier, engines=2, route="session", prefill_tokens_per_second=1000
        )
        found = replay.run([first, other]).hit_tokens
        assert [len(engine.tiers.tiers[0].held) for engine in replay.engines] in ([4, 5], [5, 4]), "one each"
        return found

    assert hits("file=unlimited:shared", 1.0) == 0, "the first prompt takes 1.024 seconds"
    assert hits("file=unlimited:shared", 1.1) == 1024
    assert hits("file=unlimited", 1.1) == 0, "of the other engine"


def test_waiting_times_are_those_of_a_queue() -> None:
    replay = simulation("host=unlimited", prefill_tokens_per_second=1024)
    results = replay.run([prompt(1024, 1, 2), prompt(1024, 3, 4, at=0.5), prompt(1024, 1, 2, at=10.0)])
    assert len(results.waits) == 3
    assert math.isclose(results.waits_without_tiers.mean, (1 + 1.5 + 1) / 3, rel_tol=1e-6)
    assert math.isclose(results.waits.mean, (1 + 1.5) / 3, rel_tol=0.01), "the third prompt was loaded"


def test_requests_at_the_start_are_replayed_but_not_counted() -> None:
    results = simulation(skip=1).run([prompt(1024, 1, 2), prompt(1024, 1, 2)])
    assert (results.requests, results.hit_rate) == (1, 1.0)


@pytest.mark.parametrize(("route", "hits"), [("prefix", 2048), ("session", 2048)])
def test_routes_send_equal_prefixes_to_the_engine_that_has_them(route: str, hits: int) -> None:
    requests = [prompt(1024, n, 9, at=float(n), session=f"s{n}") for n in range(8)]
    again = [prompt(1024, n, 9, at=10.0 + n, session=f"s{n}") for n in range(2)]
    assert simulation(engines=4, route=route).run(requests + again).hit_tokens == hits


def test_prompts_that_share_little_are_spread_over_engines() -> None:
    system, own = [1], [[100 * n + m for m in range(7)] for n in range(8)]
    route, idle = route_named("prefix", 4, 0), np.zeros(4, np.int64)
    requests = [prompt(8 * UNIT, *system, *each) for each in own]
    assert sorted(route(one, idle) for one in requests) == [0, 0, 1, 1, 2, 2, 3, 3]
    longer = [prompt(9 * UNIT, *system, *each, 7) for each in own]
    assert [route(one, idle) for one in longer] == [route(one, idle) for one in requests]


def test_a_load_of_a_recurrent_model_ends_at_a_snapshot() -> None:
    recurrent = model(RECURRENT, step_tokens=8192, first_snapshot_tokens=0)
    replay = simulation(of=recurrent)
    results = replay.run([prompt(8 * UNIT, *range(8)), prompt(8 * UNIT, *range(7), 99)])
    assert results.hit_tokens == 0, "the only snapshot is near the end of the first prompt"
    assert results.lost_tokens > 3000
    assert results.group_tokens[recurrent.state or 0] == 0
    steps = model(RECURRENT, step_tokens=1024, retention=None, first_snapshot_tokens=0)
    finer = simulation(of=steps).run([prompt(8 * UNIT, *range(8)), prompt(8 * UNIT, *range(7), 99)])
    assert finer.hit_tokens == 2880, "steps end at whole blocks of 80 tokens: every 960"
    assert finer.lost_tokens <= 1024


def test_a_second_prompt_that_shares_a_prefix_loads_half_of_it_and_a_third_all_of_it() -> None:
    hits: list[int] = []
    replay = simulation(of=model(RECURRENT, step_tokens=8192), on_hit=lambda _, hit: hits.append(hit.found))
    replay.run([prompt(8 * UNIT, *range(7), user) for user in (7, 99, 98, 97)])
    assert hits == [0, 2080, 3520, 3520], "at 1,040 and its doubles; 7 units have 3,584 tokens"


def test_the_curve_is_the_hit_rate_of_a_replay_at_each_capacity() -> None:
    rng = np.random.default_rng(3)
    requests = [prompt(1100 + 90 * int(n), 1, 2 + int(n), 7) for n in rng.integers(0, 5, 40)]
    replay = simulation()
    replay.run(requests)
    dense = model()
    for point in hit_rate_curve(passes_over(lambda: requests), replay.replayed()):
        alone = simulation(f"host={point.capacity_bytes}B", of=dense).run(requests)
        assert alone.hit_rate == pytest.approx(point.hit_rate), point.capacity_bytes


def test_the_outcome_fits_a_terminal_a_page_and_json() -> None:
    replay = simulation("host=1GiB", "file=unlimited", of=model(RECURRENT), prefill_tokens_per_second=1e4)
    requests = [prompt(8 * UNIT, *range(8)), prompt(8 * UNIT, *range(8), at=1.0)]
    replay.run(requests)
    points = tuple(hit_rate_curve(passes_over(lambda: requests), replay.replayed()))
    assert len(points) == 8
    found = Outcome(replay.replayed(), "trace<1>.jsonl", complete=False, curve=points)
    for width in (40, 60, 80, 120):
        text = StringIO()
        show(found, Report(Console(file=text, width=width), width))
        assert max(map(len, text.getvalue().splitlines())) <= width
        assert text.getvalue().startswith("Interrupted")
    values = json.loads(json.dumps(as_json(found)))
    assert values["hit_rate"] == replay.results.hit_rate
    assert [tier["name"] for tier in values["tiers"]] == ["host", "file"]
    assert values["time_to_first_token"]["with_tiers"]["p50"] > 0
    html = page(found)
    assert "<polyline" in html
    assert "trace&lt;1&gt;" in html


@pytest.mark.parametrize(
    ("tiers", "settings", "message"),
    [
        (["file=1TiB"], {}, "begin with one --tier host=SIZE"),
        (["host=1GiB", "host=2GiB"], {}, "begin with one --tier host=SIZE"),
        (["host=1GiB"], {"policy": "fifo"}, "choose one of lru, arc, s3fifo, density"),
        (["host=1GiB"], {"route": "round"}, "choose one of prefix, session, least-busy, random"),
        (["host=1GiB"], {"engines": 0}, "--engines is 0; it must be at least 1"),
        (["disk=1GiB"], {}, "is not a tier"),
        (["host=1GiB", "fleet=1GiB"], {}, "is not a tier"),
        (["host=1GiB", "fleet", "fleet"], {}, "is given twice"),
        (["host=1GiB:shared"], {}, "is not a tier"),
        (["host=0"], {}, "must be above 0"),
        (["host=many"], {}, "is not a size"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    tiers: list[str], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulation(*tiers, **settings)
