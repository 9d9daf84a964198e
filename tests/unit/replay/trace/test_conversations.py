"""Conversations as text.

The sample has the form that ``benchmarks/multi_turn/bench_dataset.py`` of vLLM 0.32 writes. It was made by
the same steps, not by that file.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.trace.base import TraceFile, TraceRequest
from kvferry.tools.replay.trace.conversations import ConversationTrace

SAMPLE = Path(__file__).parent / "samples" / "vllm_multi_turn.json"


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TALK = {
    "id": "a",
    "messages": [
        message("user", "q" * 80),
        message("assistant", "a" * 120),
        message("user", "r" * 40),
        message("assistant", "b" * 8),
    ],
}


def sessions(trace: ConversationTrace) -> list[list[TraceRequest]]:
    return [[first, *first.later] for first in trace]


@pytest.fixture
def trace(tmp_path):
    def make(*conversations: object, indent: int | None = 2) -> ConversationTrace:
        (tmp_path / "trace").write_text(json.dumps(conversations, indent=indent))
        return ConversationTrace(TraceFile(tmp_path / "trace"), None)

    return make


@pytest.mark.parametrize("indent", [None, 2])
def test_each_answer_makes_a_request_with_all_messages_before_it(trace, indent) -> None:
    [turns] = sessions(trace(TALK, indent=indent))
    assert [(each.prompt_tokens, each.output_tokens) for each in turns] == [(20, 30), (60, 2)]
    assert [each.delay for each in turns] == [0.0, 0.0]
    assert turns[0].prefix_ids.tolist() == turns[1].prefix_ids[:3].tolist(), "with the answer"
    assert {each.session for each in turns} == {"a"}


def test_a_last_message_that_nobody_answers_is_a_request_without_an_answer(trace) -> None:
    [turns] = sessions(trace({"id": 7, "messages": [*TALK["messages"], message("user", "s" * 12)]}))
    assert [(each.prompt_tokens, each.output_tokens) for each in turns] == [(20, 30), (60, 2), (65, 0)]


def test_conversations_that_vllm_generated_share_the_prefix_that_it_gave_them() -> None:
    found = sessions(ConversationTrace(TraceFile(SAMPLE), None))
    messages = [each["messages"] for each in json.loads(SAMPLE.read_text())]
    assert [len(turns) for turns in found] == [len(each) // 2 for each in messages]
    for turns, each in zip(found, messages, strict=True):
        assert turns[-1].prompt_tokens == sum(len(one["content"].encode()) for one in each[:-1]) // 4
    texts = [each[0]["content"].encode() for each in messages]
    common = next(n for n, each in enumerate(zip(*texts, strict=False)) if len(set(each)) > 1) // 4 // 16
    assert common > 1
    first, second, third = (turns[0].prefix_ids.tolist() for turns in found)
    assert first[:common] == second[:common] == third[:common]
    assert not set(first[common:]) & {*second, *third}


def test_equal_text_is_equal_content_up_to_the_first_difference(trace) -> None:
    other = {"id": "b", "messages": [message("user", "q" * 80 + "x" * 120), message("assistant", "a")]}
    [[first, _], [found]] = sessions(trace(TALK, other))
    assert found.prefix_ids[0] == first.prefix_ids[0]
    assert not set(found.prefix_ids[1:]) & set(first.prefix_ids)
    [[again, _], [same]] = sessions(trace(TALK, {"id": "c", "messages": TALK["messages"][:1]}))
    assert again.prompt_id == same.prompt_id != found.prompt_id, "a prompt that ends inside a unit"


def test_conversations_begin_one_second_apart(trace) -> None:
    empty = {"id": "nothing", "messages": []}
    found = trace(TALK, TALK | {"id": "b"}, empty, TALK | {"id": "c"})
    assert [turns[0].arrival for turns in sessions(found)] == [0.0, 1.0, 3.0]
    assert "a token is assumed for each 4 bytes" in found.notes()[0]
    assert "they begin one second apart" in found.notes()[1]


def test_the_bytes_of_the_text_count_and_not_its_characters(trace) -> None:
    [[turn]] = sessions(trace({"id": "a", "messages": [message("user", "漢" * 8)]}, indent=None))
    assert turn.prompt_tokens == 6


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"id": "a"}]', "line 1: Object missing required field `messages`, in .*; give each conversation"),
        (
            '[\n{"id": "a", "messages": [{"role": "user", "content": [1]}]}]',
            "line 2: Expected `str`, got `array`",
        ),
        ('[{"id": "a", "messages": []}', "line 1: found the end of the file; expected a JSON object or ]"),
        ("[}", "line 1: found }; expected a JSON object or ]; give a complete array of conversations"),
        ('[{"id": "a", "messages": []}] 7', "line 1: found ] 7; expected"),
    ],
)
def test_an_array_of_anything_else_is_refused(tmp_path, text: str, problem: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        list(ConversationTrace(TraceFile(tmp_path / "trace"), None))


def test_a_large_array_is_read_one_conversation_at_a_time(tmp_path) -> None:
    with (tmp_path / "trace").open("w") as file:
        long = message("user", "q" * 8000)
        file.write("[\n" + ",\n".join(json.dumps({"id": n, "messages": [long]}) for n in range(400)) + "]")
    assert (tmp_path / "trace").stat().st_size > 3_200_000
    tracemalloc.start()
    found = sum(1 for _ in ConversationTrace(TraceFile(tmp_path / "trace"), None))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == 400
    assert peak < 1_000_000
