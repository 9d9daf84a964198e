"""Traces of AIPerf. The sample has turns that ``aiperf synthesize agentic-code`` generated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.trace.aiperf import AIPerfTrace
from kvferry.tools.replay.trace.base import TraceFile, TraceRequest
from support.replayed import chained

SAMPLE = Path(__file__).parent / "samples" / "aiperf.jsonl"
"""Three turns of two sessions of one group and of a session of another, by AIPerf 0.13.0 with the seed 42."""


def start(session: str, tokens: int, *ids: int, **more: object) -> dict[str, object]:
    fixed = {"session_id": session, "input_length": tokens, "output_length": 100, "hash_ids": list(ids)}
    return fixed | {"timestamp": 0.0, "group_id": 4} | more


def turn(session: str, tokens: int, *ids: int, **more: object) -> dict[str, object]:
    fixed = {"session_id": session, "input_length": tokens, "output_length": 50, "hash_ids": list(ids)}
    return fixed | {"delay": 2450.3} | more


TWO = [start("a", 1100, 0, 1, 2), turn("a", 600, 90, 91), turn("a", 10, 92), start("b", 1100, 0, 1, 2)]


@pytest.fixture
def trace(tmp_path):
    def make(*rows: object, unit_tokens: int | None = None) -> AIPerfTrace:
        (tmp_path / "trace").write_text("".join(json.dumps(each) + "\n" for each in rows))
        return AIPerfTrace(TraceFile(tmp_path / "trace"), unit_tokens)

    return make


def sessions(trace: AIPerfTrace) -> list[list[TraceRequest]]:
    return [[first, *first.later] for first in trace]


def test_a_prompt_is_all_that_its_session_has_had_so_far(trace) -> None:
    [turns, [other]] = sessions(trace(*TWO))
    assert [each.prompt_tokens for each in turns] == [1100, 1100 + 100 + 600, 1800 + 50 + 10]
    assert [each.output_tokens for each in turns] == [100, 50, 50]
    assert [each.delay for each in turns] == pytest.approx([0.0, 2.4503, 2.4503])
    assert {each.session for each in turns} == {"a"}
    assert other.prompt_tokens == 1100


def test_sessions_that_aiperf_generated_share_what_it_gave_them() -> None:
    found = sessions(AIPerfTrace(TraceFile(SAMPLE), None))
    assert [[turn.prompt_tokens for turn in turns] for turns in found] == [
        [53_238, 53_238 + 80 + 673, 53_991 + 658 + 668],
        [63_702, 63_702 + 49 + 586, 64_337 + 2_211 + 1_108],
        [54_785, 54_785 + 53 + 263, 55_101 + 143 + 1_466],
    ]
    assert [turn.delay for turn in found[1]] == pytest.approx([0.0, 0.9254, 3.3846])
    first, second, other = (turns[2].prefix_ids.tolist() for turns in found)
    # By its manifest, 32,000 tokens (63 ids) for all, and 20,000 more (40 ids) for the sessions of a group.
    assert first[:103] == second[:103]
    assert first[:63] == other[:63]
    assert not set(first[103:]) & {*second, *other}
    assert not set(other[63:]) & {*first, *second}


def test_sessions_that_begin_alike_have_equal_ids_up_to_their_first_answer(trace) -> None:
    [[first, second, third], [other]] = sessions(trace(*TWO))
    assert first.prefix_ids.tolist() == chained([0, 1]).tolist() == other.prefix_ids.tolist()
    assert first.prompt_id == other.prompt_id == chained([0, 1, 2])[2]
    assert second.prefix_ids[:2].tolist() == first.prefix_ids.tolist()
    assert third.prefix_ids[:3].tolist() == second.prefix_ids.tolist()
    assert len(third.prefix_ids) == 1910 // 512
    assert second.prompt_id != third.prompt_id


def test_an_answer_is_known_to_its_session_alone(trace) -> None:
    long = {"output_length": 500}
    [[first, second], [other]] = sessions(
        trace(
            start("a", 1024, 0, 1, **long),
            turn("a", 512, 90),
            start("b", 1024, 0, 1) | {"output_length": 512},
        )
    )
    assert len(first.prefix_ids) == 2
    assert second.prefix_ids[2] != other.prefix_ids[2]


def test_a_session_without_ids_has_content_of_its_own(trace) -> None:
    rows = [start("a", 1100) | {"hash_ids": []}, turn("a", 600) | {"hash_ids": []}, start("b", 1100)]
    [[first, second], [other]] = sessions(trace(*rows))
    assert second.prefix_ids[:2].tolist() == first.prefix_ids.tolist()
    assert not set(first.prefix_ids) & set(other.prefix_ids)


def test_sessions_begin_at_their_times_or_one_second_apart(trace) -> None:
    assert [each.arrival for each in trace(start("a", 5, 1), start("b", 5, 1, timestamp=1500.0))] == [
        0.0,
        1.5,
    ]
    rows = [start(name, 5, 1) for name in "ab"]
    for row in rows:
        del row["timestamp"]
    found = trace(*rows)
    assert [each.arrival for each in found] == [0.0, 1.0]
    assert "does not say when its sessions begin" in found.notes()[0]
    assert trace(*TWO).notes() == []


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (start("a", 5, 1), "line 2: a later turn of a session has a timestamp; give its delay"),
        (
            turn("a", 600, 3, 4, 5),
            "line 2: 3 hash_ids for 600 .*; expected 2 .*, or set --unit-tokens to 200",
        ),
        (turn("a", 600, 3, 4, delay=-1), r"line 2: Expected `float` >= 0.0 - at `\$.delay`"),
        (turn("b", 600, 3, 4), "line 2: only some sessions begin with a timestamp"),
        (
            turn("a", 5, 1, context_mode="message_array_with_responses"),
            "line 2: context_mode is message_array_with",
        ),
        (turn("a", 1 << 24, *range(1 << 15)), "line 2: the session has 16,777,371 tokens so far"),
        ({"session_id": "a", "text_input": "x"}, "line 2: Object missing required field `input_length`"),
    ],
)
def test_turns_that_cannot_be_used_are_refused(trace, row, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        list(trace(start("a", 5, 1), row))


def test_the_turns_of_a_session_stand_together(trace) -> None:
    with pytest.raises(ConfigError, match="line 3: the session a goes on after the lines of another one"):
        list(trace(start("a", 5, 1), start("b", 5, 1), turn("a", 5, 1)))
