"""What hints of clients are worth in a replay."""

from __future__ import annotations

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.hinting import EngineHints, end_session
from kvferry.tools.replay.hints import HintSetting, count_turns, parse_hint
from kvferry.tools.replay.show import Outcome, as_json
from support.small_replays import UNIT, prompt, simulation

CHUNKS = UNIT // 256
"""Chunks of a unit."""
SIZE = simulation().tiers[0][0].chunk_bytes[0]


def hinted(*hints: str, share: float = 0.25, turns=()) -> HintSetting:
    counted = count_turns("a trace", turns) if turns else {}
    return HintSetting(tuple(map(parse_hint, hints)), share, 3600.0, counted)


def replayed(requests, *hints, chunks=16, tiers=(), share=0.25, **settings):
    """Replay with host memory for so many chunks, and return the simulation."""
    setting = hinted(*hints, share=share, turns=requests if settings.pop("has_sessions", False) else ())
    made = simulation(f"host={chunks * SIZE}B", *tiers, hints=setting if hints else None, **settings)
    made.run(requests)
    return made


def found(made):
    return made.results.hit_tokens


def flood(first, count, at, tenant=""):
    """Prompts of one unit that nobody asks again."""
    return [prompt(UNIT, n, at=at, tenant=tenant) for n in range(first, first + count)]


def test_a_retained_session_outlasts_a_flood_and_an_unretained_one_does_not():
    again = prompt(UNIT, 1, at=3.0)
    chat = [prompt(UNIT, 1, at=0.0), *flood(10, 20, 1.0), *flood(40, 20, 2.0), again]
    assert found(replayed(chat)) == 0
    assert found(replayed(chat, "retain_seconds=10")) == UNIT
    # A chunk whose time has passed counts as just used. The second flood evicts it.
    assert found(replayed(chat, "retain_seconds=1.5")) == 0


def test_all_that_is_retained_stays_within_the_share():
    prompts = [prompt(UNIT, n % 8, at=n) for n in range(16)]
    made = replayed(prompts, "retain_seconds=100", chunks=8)
    assert made.engines[0].hints.most_retained == 2 * SIZE
    assert replayed(prompts, "retain_seconds=100", chunks=8, share=0.0).engines[0].hints.most_retained == 0


def test_a_span_retains_its_own_chunks_only():
    again = prompt(2 * UNIT, 1, 2, at=2.0)
    trace = [prompt(2 * UNIT, 1, 2), *flood(10, 30, 1.0), again]
    assert found(replayed(trace, f"retain_seconds=10,end={UNIT},prompt_below=2000")) == UNIT
    assert found(replayed(trace, f"retain_seconds=10,start={UNIT},prompt_below=2000")) == 0


def test_hints_of_a_tenant_take_nothing_from_another():
    mine, again = prompt(UNIT, 1, at=2.0, tenant="a"), prompt(UNIT, 1, at=4.0, tenant="a")
    before, after = flood(10, 20, 1.0, "b"), flood(10, 20, 3.0, "b")
    assert found(replayed([mine, *after, again], "retain_seconds=10")) == UNIT
    # The first flood has filled the share, and gives way in half of it.
    made = replayed([*before, mine, *after, again], "retain_seconds=10")
    assert made.results.by_tenant["a"].hit_tokens == UNIT


def test_a_prompt_is_stored_in_the_room_that_retained_chunks_leave():
    trace = [prompt(UNIT, 1), *(prompt(2 * UNIT, 2, 3, at=at) for at in (1.0, 2.0))]
    made = replayed(trace, "retain_seconds=10,prompt_below=2000", chunks=2 * CHUNKS)
    retained = made.engines[0].hints.most_retained // SIZE
    assert found(made) == (2 * CHUNKS - retained) * 256


def test_tenants_share_no_content():
    ask = [prompt(UNIT, 1, at=0.0, tenant=tenant) for tenant in ("a", "b", "", "a")]
    made = replayed(ask)
    assert found(made) == UNIT
    assert {label: one.hit_tokens for label, one in made.results.by_tenant.items()} == {"a": UNIT, "b": 0}


def test_nothing_is_stored_after_a_limit():
    trace = [prompt(2 * UNIT, 1, 2), prompt(2 * UNIT, 1, 2, at=1.0)]
    assert found(replayed(trace)) == 2 * UNIT
    assert found(replayed(trace, f"store=false,start={UNIT}")) == UNIT
    assert found(replayed(trace, "store=false")) == 0
    assert found(replayed(trace, f"store=false,prompt_below={2 * UNIT}")) == 2 * UNIT


def test_a_session_that_has_ended_leaves_room_for_others():
    # Host memory has room for two prompts. The session ends after the other prompt was used.
    other = prompt(UNIT, 7, at=0.0)
    trace = [other, prompt(UNIT, 1, at=1.0, session="s"), prompt(UNIT, 8, at=2.0), prompt(UNIT, 7, at=3.0)]
    room = 2 * CHUNKS
    assert found(replayed(trace, chunks=room)) == 0
    assert found(replayed(trace, "ends_session", chunks=room, has_sessions=True)) == UNIT


def test_only_the_last_turn_ends_a_session():
    # Host memory has room for two prompts, and the other one is older.
    trace = [
        prompt(UNIT, 2, at=0.0),
        prompt(UNIT, 1, at=1.0, session="s"),
        prompt(UNIT, 3, at=2.0),
        prompt(UNIT, 1, at=3.0, session="s"),
    ]
    assert found(replayed(trace, "ends_session", chunks=2 * CHUNKS, has_sessions=True)) == UNIT


FILE = ("file=unlimited",)


def test_prefetch_moves_the_next_turn_to_host_memory():
    trace = [prompt(UNIT, 1, at=0.0, session="s"), *flood(10, 20, 1.0), prompt(UNIT, 1, at=9.0, session="s")]
    plain = replayed(trace, tiers=FILE)
    assert plain.results.tier_tokens == [0, UNIT]
    early = replayed(trace, "prefetch=session,lead_seconds=5", tiers=FILE, has_sessions=True)
    assert early.results.tier_tokens == [UNIT, 0]
    late = replayed(trace, "prefetch=session,lead_seconds=0", tiers=FILE, has_sessions=True)
    assert late.results.tier_tokens == [0, UNIT], "nothing can be read in no time"
    none = replayed(trace, "prefetch=session,lead_seconds=5", tiers=FILE, has_sessions=True, share=0.0)
    assert none.results.tier_tokens == [0, UNIT]


def test_prefetch_brings_what_a_tier_reads_before_the_turn():
    trace = [prompt(UNIT, 1, at=0.0, session="s"), *flood(10, 20, 1.0), prompt(UNIT, 1, at=9.0, session="s")]
    made = simulation(
        f"host={16 * SIZE}B",
        *FILE,
        hints=hinted(f"prefetch=session,lead_seconds={1.5 * SIZE / 3e9}", turns=trace),
    )
    made.run(trace)
    assert made.results.tier_tokens == [256, UNIT - 256]


def test_prefetch_of_a_later_turn_begins_when_the_turn_before_has_ended():
    later = prompt(UNIT, 1, session="s", delay=3.0)
    trace = lambda: [  # noqa: E731 - turns can be iterated once
        prompt(UNIT, 1, at=0.0, session="s", later=iter([later])),
        *flood(10, 20, 1.0),
    ]
    setting = hinted("prefetch=session,lead_seconds=1", turns=trace())
    made = simulation(f"host={16 * SIZE}B", *FILE, hints=setting)
    made.run(trace())
    assert made.results.tier_tokens == [UNIT, 0]
    assert setting.turns == {("", "s"): 2}


def test_outcome_compares_with_and_without_hints():
    chat = [prompt(UNIT, 1, at=0.0, tenant="a"), *flood(10, 20, 1.0), prompt(UNIT, 1, at=2.0, tenant="a")]
    with_hints = replayed(chat, "retain_seconds=10,priority=3")
    outcome = Outcome(with_hints.replayed(), "t", complete=True, without_hints=replayed(chat).replayed())
    values = as_json(outcome)
    assert values["hints"]["hints"] == ["retain_seconds=10,priority=3"]
    assert values["hints"]["hit_rate_without_hints"] == 0.0 < values["hints"]["hit_rate"]
    assert values["hints"]["retained_bytes"] == 4 * SIZE
    assert [one["tenant"] for one in values["by_tenant"]] == ["", "a"]
    assert values["by_tenant"][1]["hit_rate"] == 0.5
    assert values["by_tenant"][1]["hit_rate_without_hints"] == 0.0


def test_replay_and_serving_share_the_code():
    from kvferry.cache import retained, sessions

    made = replayed([prompt(UNIT, 1)], "retain_seconds=10")
    assert isinstance(made.engines[0].hints, EngineHints)
    assert isinstance(made.engines[0].hints.retained, retained.RetainedChunks)
    assert end_session is sessions.end_session


@pytest.mark.parametrize(
    "text",
    [
        "",
        "retain_seconds",
        "retain_seconds=soon",
        "retain_seconds=-1",
        "priority=3",
        "retain=600",
        "store=true",
        "prefetch=prompt",
        "prefetch",
        "lead_seconds=3",
        "retain_seconds=3,lead_seconds=3",
        "ends_session,retain_seconds=3",
        "ends_session,prompt_below=9",
        "prefetch=session,prompt_below=9",
        "retain_seconds=3,prompt_below=0",
    ],
)
def test_a_hint_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="write retain_seconds=600"):
        parse_hint(text)


def test_a_trace_without_sessions_is_refused_for_hints_about_sessions():
    with pytest.raises(ConfigError, match=r"x has no sessions.*; give a trace with sessions"):
        count_turns("x", [prompt(UNIT, 1)])


def test_share_is_that_of_the_setting():
    with pytest.raises(ConfigError, match=r"--hint-share is 0.3; give a share from 0 to 0.25"):
        hinted("retain_seconds=3", share=0.3)
