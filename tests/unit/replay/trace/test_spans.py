"""Spans of OpenTelemetry. The samples were written by the file exporter of its SDK for Python, 0.66b1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.trace.base import TraceFile
from kvferry.tools.replay.trace.spans import SpanTrace

SAMPLES = Path(__file__).parent / "samples"
AGENT = SAMPLES / "opentelemetry_agent.jsonl"
"""Two conversations of an agent: spans of an agent, of its requests to a model, and of a tool."""
ENGINE = SAMPLES / "opentelemetry_vllm.jsonl"
"""Three spans with the attributes of vLLM 0.32. The first request to arrive is the last one to end."""


def trace_of(path: Path) -> SpanTrace:
    return SpanTrace(TraceFile(path), 16)


def lengths(trace: SpanTrace) -> list[tuple[float, int, int]]:
    return [(each.arrival, each.prompt_tokens, each.output_tokens) for each in trace]


def changed(tmp_path: Path, path: Path, old: str, new: str) -> SpanTrace:
    assert old in path.read_text()
    (tmp_path / "changed").write_text(path.read_text().replace(old, new))
    return trace_of(tmp_path / "changed")


def test_requests_to_a_model_are_read_and_not_the_agents_that_sum_them_up() -> None:
    trace = trace_of(AGENT)
    assert lengths(trace) == [(0.0, 900, 150), (1.5, 900, 150), (4.0, 3000, 180), (5.5, 3000, 180)]
    assert trace.tells_prefixes


def test_a_request_continues_the_one_before_it_in_its_conversation() -> None:
    first, other, second, _ = trace_of(AGENT)
    assert first.session == second.session != other.session
    shared = (900 + 150) // 16
    assert (second.prefix_ids[:shared] == first.prefix_ids).all()
    assert not set(first.prefix_ids) & set(other.prefix_ids)


def test_a_conversation_may_have_several_traces(tmp_path) -> None:
    assert len({each.session for each in changed(tmp_path, AGENT, "conv-2", "conv-1")}) == 1


def test_without_a_conversation_the_requests_of_a_trace_belong_together(tmp_path) -> None:
    trace = changed(tmp_path, AGENT, "gen_ai.conversation.id", "conversation")
    first, other, second, _ = trace
    assert first.session == second.session != other.session
    assert trace.tells_prefixes


def test_the_spans_of_an_engine_are_sorted_by_arrival_and_tell_only_lengths() -> None:
    trace = trace_of(ENGINE)
    assert lengths(trace) == [(0.0, 700, 400), (0.5, 300, 20), (1.0, 520, 30)]
    assert not trace.tells_prefixes
    assert "has only lengths" in trace.notes()[0]


def test_a_request_that_the_application_and_the_engine_report_counts_once(tmp_path) -> None:
    (tmp_path / "both").write_text(AGENT.read_text() + ENGINE.read_text())
    assert lengths(trace_of(tmp_path / "both")) == lengths(trace_of(AGENT))


def test_integers_may_be_numbers(tmp_path) -> None:
    assert lengths(changed(tmp_path, ENGINE, '"intValue":"300"', '"intValue":300'))[1] == (0.5, 300, 20)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"intValue":"300"', '"intValue":"0"', "line 1: a span has 0 prompt tokens and 20 output tokens"),
        ('"intValue":"300"', '"intValue":"x"', "line 1: .*'x'; expected an integer"),
        (
            "prompt_tokens",
            "other",
            "has no span with gen_ai.usage.input_tokens or gen_ai.usage.prompt_tokens",
        ),
        ('"scopeSpans":[', '"scopeSpans":[3,', "Expected `object`, got `int`"),
    ],
)
def test_spans_that_cannot_be_used_are_refused(tmp_path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(tmp_path, ENGINE, old, new)


def test_what_follows_shorter_prompts_on_one_line_has_nothing_in_common(tmp_path) -> None:
    resources = [json.loads(line)["resourceSpans"] for line in AGENT.read_text().splitlines()]
    one = json.dumps({"resourceSpans": [each for line in resources for each in line]})
    assert one.count('"intValue": "3000"') == 2
    (tmp_path / "one").write_text(one.replace('"intValue": "3000"', '"intValue": "320"'))
    first, other, second, last = trace_of(tmp_path / "one")
    assert (second.prefix_ids[:20] == first.prefix_ids[:20]).all()
    assert not set(second.prefix_ids) & set(last.prefix_ids)
    assert not set(second.prefix_ids[20:]) & {*first.prefix_ids, *other.prefix_ids}
