"""Traces of Weka's KV Cache Tester.

The traces themselves are not part of the project. Field names and types are those of AIPerf's models
(https://github.com/ai-dynamo/aiperf, ``src/aiperf/dataset/loader/weka_trace_models.py``), which take
`SESSION`, and of https://github.com/callanjfox/kv-cache-tester, ``docs/trace_replay_tester.md``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from typing import Any

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.trace.base import TraceFile, TraceRequest
from kvferry.tools.replay.trace.weka import WekaTrace
from support.replayed import chained

MODEL = "claude-opus-4-5-20251101"


def call(t: float, tokens: int, *ids: int, kind: str = "s", **more: object) -> dict[str, Any]:
    fixed = {"t": t, "type": kind, "model": MODEL, "in": tokens, "out": 9, "hash_ids": list(ids)}
    return fixed | {"input_types": ["text"], "output_types": ["text"], "stop": "tool_use"} | more


def sub_agent(t: float, *requests: dict[str, Any], status: str = "completed") -> dict[str, Any]:
    fixed = {"t": t, "type": "subagent", "agent_id": "agent_001", "subagent_type": "Explore"}
    return fixed | {"status": status, "requests": list(requests), "models": [MODEL]}


SESSION: dict[str, Any] = {
    "id": "trace_0001",
    "models": [MODEL],
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 12524,
    "system_tokens": 3189,
    "requests": [
        call(0.0, 130, 1, 2, ttft=1.0, api_time=4.0, think_time=0.0),
        sub_agent(5.0, call(0.5, 70, 1, kind="n"), call(3.0, 200, 1, 7, 8, ttft=0.5)),
        sub_agent(6.0, call(1.0, 64, 9), status="async_launched"),
        call(20.0, 200, 1, 2, 3, 4, think_time=2.0),
        call(30.0, 192, 1, 2, 5),
    ],
}


@pytest.fixture
def trace(tmp_path):
    def make(*sessions: object) -> WekaTrace:
        (tmp_path / "trace").write_text("".join(json.dumps(each) + "\n" for each in sessions))
        return WekaTrace(TraceFile(tmp_path / "trace"))

    return make


def changed(**changes: object) -> dict[str, Any]:
    return copy.deepcopy(SESSION) | changes


def delays(turns: Iterable[TraceRequest]) -> list[float]:
    return [round(turn.delay, 6) for turn in turns]


def test_a_delay_is_counted_from_the_first_token_of_what_a_turn_waits_for(trace) -> None:
    [first] = trace(SESSION)
    agent, behind = first.branches
    assert (agent.is_awaited, behind.is_awaited) == (True, False)
    assert delays(agent.turns) == [4.5, 2.5], "5.5 s and 8.0 s, after the first tokens at 1.0 s and 5.5 s"
    assert delays(behind.turns) == [6.0]
    assert delays(first.later) == [11.5, 10.0], (
        "20.0 s, after 8.5 s, the first token of the sub-agent's last turn"
    )


def test_times_of_a_sub_agent_may_count_from_the_start_of_the_session(trace) -> None:
    absolute = changed()
    for inner in absolute["requests"][1]["requests"]:
        inner["t"] += 5.0
    [relative], [same] = trace(SESSION), trace(absolute)
    assert delays(same.branches[0].turns) == delays(relative.branches[0].turns)
    assert delays(same.later) == delays(relative.later)


def test_sub_agents_can_be_nested_and_come_first(trace) -> None:
    inner = sub_agent(1.0, call(0.25, 64, 9))
    [first] = trace(changed(requests=[sub_agent(2.0, call(0.0, 70, 1), inner), call(9.0, 70, 1)]))
    assert delays(first.later) == [9.0 - 3.25]
    assert [delays(branch.turns) for branch in first.branches] == [[1.25]]


def test_ids_are_those_of_the_whole_prompt(trace) -> None:
    [first] = trace(changed(hash_id_scope="global"))
    second, third = first.later
    assert first.prefix_ids.tolist() == chained([1, 2]).tolist()
    assert second.prefix_ids.tolist() == chained([1, 2, 3]).tolist()
    assert second.prompt_id == chained([1, 2, 3, 4])[3]
    assert third.prefix_ids.tolist() == chained([1, 2, 5]).tolist()
    [agent, _] = first.branches
    assert [turn.prefix_ids.tolist() for turn in agent.turns] == [
        chained(ids).tolist() for ids in ([1], [1, 7, 8])
    ]


def test_local_ids_count_in_their_session_alone(trace) -> None:
    first, other = trace(SESSION, changed(id="trace_0002"))
    assert first.prefix_ids[0] == next(first.later).prefix_ids[0]
    assert not set(first.prefix_ids) & set(other.prefix_ids)
    old = changed(id="trace_0003")
    del old["hash_id_scope"]
    [found] = trace(old)
    assert not set(found.prefix_ids) & set(first.prefix_ids), "old files do not name the scope"
    shared, again = trace(changed(hash_id_scope="global"), changed(id="b", hash_id_scope="global"))
    assert shared.prefix_ids.tolist() == again.prefix_ids.tolist()


def test_a_prompt_without_ids_has_nothing_in_common_with_others(trace) -> None:
    [first] = trace(changed(requests=[call(0.0, 130), call(1.0, 130)]))
    assert not set(first.prefix_ids) & set(next(first.later).prefix_ids)


def test_sessions_begin_one_second_apart(trace) -> None:
    found = trace(SESSION, changed(id="b", requests=[]), changed(id="c"))
    assert [each.arrival for each in found] == [0.0, 2.0]
    assert [each.session for each in found] == ["trace_0001", "c"]
    assert "does not say when its sessions begin" in found.notes()[0]


def test_turns_that_overlap_follow_each_other(trace) -> None:
    [first] = trace(changed(requests=[call(0.0, 64, 1, ttft=5.0), call(1.0, 64, 2)]))
    assert delays(first.later) == [0.0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"block_size": 32}, "line 2: block_size is 32 after 64; all must be equal"),
        ({"hash_id_scope": "planet"}, r"line 2: Invalid enum value 'planet' - at `\$.hash_id_scope`"),
        (
            {"requests": [call(0.0, 300, 1, 2)]},
            "line 2: 2 hash_ids for 300 prompt tokens; expected 5 of 64 tokens",
        ),
        ({"requests": [call(-1.0, 64, 1)]}, r"line 2: Expected `float` >= 0.0 - at `\$.requests\[0\].t`"),
        ({"requests": [{"t": 0.0, "type": "x"}]}, "line 2: Invalid value 'x'"),
        ({"requests": [{"type": "n", "t": 0.0}]}, "line 2: Object missing required field `in`"),
    ],
)
def test_sessions_that_cannot_be_used_are_refused(trace, change, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        list(trace(SESSION, changed(**change)))
