"""Streams of decode engines that fail, and that another one continues."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import anyio
import pytest

from kvferry.tools.serving.router.continuation import Transcript, may_continue, whole_characters
from support.clock import Clock
from support.token_engine import TokenEngine, session_for, text_of
from support.waiting import wait_for

PROMPT = "a prompt of some tokens"
PATHS = ("/v1/completions", "/v1/chat/completions")
TOKENS = 40


def body_of(path: str, **more: Any) -> dict[str, Any]:
    prompt = {"prompt": PROMPT} if path == PATHS[0] else {"messages": [{"role": "user", "content": PROMPT}]}
    return {"model": "m", "stream": True, "max_tokens": TOKENS, **prompt, **more}


class Routed:
    """A router over two decode engines, of which the first gets the requests, and one alone."""

    def __init__(self, stage, fake, serve_app, stack: contextlib.ExitStack, **settings: Any) -> None:
        self.first, self.second = TokenEngine(), TokenEngine(created=2)
        self.urls = [stack.enter_context(serve_app(one.app())) for one in (self.first, self.second)]
        self.prefill = fake()
        self.clock = Clock()
        self.scene = stage([self.prefill], self.urls, probe_seconds=0.02, clock=self.clock, **settings)
        self.headers = {"x-session-id": session_for(self.urls[0], self.urls[1:]), "x-request-id": "mine"}

    def up(self) -> bool:
        return all(one["up"] for one in self.scene.client.get("/health").json()["decode"])

    def ask(self, path: str, **more: Any) -> bytes:
        """Return the events of the stream that the router gives, after the first engine was asked."""
        wait_for(self.up)
        self.clock.now += 1000  # no engine rests, and no request is suspected of ending engines
        asked = len(self.first.bodies)
        answer = self.scene.client.post(path, json=body_of(path, **more), headers=self.headers)
        assert answer.status_code == 200
        assert len(self.first.bodies) == asked + 1
        return answer.content

    def alone(self, path: str, **more: Any) -> bytes:
        """Return the events of the stream that the first engine gives without any failure."""
        dies, self.first.dies_after = self.first.dies_after, None
        loses, self.first.loses = self.first.loses, 0
        try:
            return self.ask(path, **more)
        finally:
            self.first.dies_after, self.first.loses = dies, loses


@pytest.fixture
def routed(stage, fake, serve_app):
    with contextlib.ExitStack() as stack:
        yield lambda **settings: Routed(stage, fake, serve_app, stack, **settings)


def chunks(events: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in events.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]


def content(events: bytes) -> tuple[str, list[int], Any, Any, list[str]]:
    """Text, token ids, finish reason, usage and roles of a stream, which has one id and one time."""
    text, ids, reasons, usages, roles = "", [], [], [], []
    found = chunks(events)
    assert len({(one["id"], one["created"], one["model"], one["object"]) for one in found}) == 1
    for chunk in found:
        if usage := chunk.get("usage"):
            cached = usage.pop("prompt_tokens_details", {"cached_tokens": 0})["cached_tokens"]
            assert cached <= usage["prompt_tokens"]
            usages.append(usage)
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            assert choice["index"] == 0
            text += choice.get("text") or delta.get("content") or ""
            ids += choice.get("token_ids") or []
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            roles += [delta["role"]] if "role" in delta else []
    assert len(reasons) == 1
    return text, ids, reasons[0], usages, roles


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["break", "abort", "error"])
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_goes_on_without_a_lost_or_repeated_token_wherever_its_engine_dies(routed, path, dies):
    here = routed()
    here.first.dies = dies
    options = {"stream_options": {"include_usage": True}}
    alone = content(here.alone(path, **options))
    assert "\ufffd" not in alone[0]
    assert len(alone[0].encode()) > len(alone[0]), "characters of several tokens"
    for per_event in (1, 3):
        here.first.per_event = per_event
        for here.first.dies_after in range(1, TOKENS, 1 if dies == "break" else 4):
            assert content(here.ask(path, **options)) == alone, here.first.dies_after
    counts = {"prompt_tokens": len(PROMPT), "total_tokens": len(PROMPT) + TOKENS, "completion_tokens": TOKENS}
    assert alone[3] == [counts]
    assert "continued_streams_total 0.0" not in here.scene.client.get("/metrics").text


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_events_are_those_that_the_engine_sends_without_token_ids(routed, path):
    """Until the engine fails. A client that asks for the ids gets them."""
    on, off = routed(), routed(continue_streams=False)
    for more in ({}, {"stream_options": {"include_usage": True}}, {"return_token_ids": True}):
        assert on.ask(path, **more) == off.ask(path, **more)
    assert on.first.bodies[0]["return_token_ids"]
    assert "return_token_ids" not in off.first.bodies[0]


@pytest.mark.slow
def test_a_client_that_wants_token_ids_gets_each_once(routed):
    here, path = routed(), PATHS[0]
    alone = content(here.alone(path, return_token_ids=True))
    assert len(alone[1]) == TOKENS
    continued = 0
    for here.first.dies_after in range(1, 20):
        answer = here.ask(path, return_token_ids=True)
        # No token that the client has is generated again, so the rest must begin with a whole character.
        whole = not text_of(alone[1][: here.first.dies_after]).endswith("\ufffd")
        assert (b"engine_failed" in answer) == (not whole)
        if whole:
            assert content(answer) == alone
            continued += 1
    assert 10 < continued < 19


@pytest.mark.slow
def test_limits_count_the_tokens_that_came(routed):
    here = routed()
    here.first.dies_after = 10
    here.ask(PATHS[0], min_tokens=15, temperature=0.5, truncate_prompt_tokens=100)
    rest = here.second.bodies[-1]
    came = len(rest["prompt"]) - len(PROMPT)
    assert (rest["max_tokens"], rest["min_tokens"]) == (TOKENS - came, 15 - came)
    assert rest["temperature"] == 0.5
    assert "truncate_prompt_tokens" not in rest
    here.ask(PATHS[0], max_tokens=None)
    assert here.second.bodies[-1]["max_tokens"] == 16 - came
    here.ask(PATHS[1])
    assert here.second.bodies[-1]["kv_transfer_params"] == {"prompt_token_ids": rest["prompt"]}


@pytest.mark.slow
def test_a_prefill_engine_computes_the_known_tokens_for_the_next_engine(routed, kv):
    here = routed()
    here.prefill.hands_over = kv
    here.first.dies_after = 10
    for path in PATHS:
        here.ask(path)
        first, again = here.prefill.bodies[-2:]
        rest = here.second.bodies[-1]
        params = rest["kv_transfer_params"]
        assert params.items() >= kv.items()
        assert "return_token_ids" not in first
        if path == PATHS[0]:
            assert again["prompt"] == rest["prompt"]
        else:
            assert again["kv_transfer_params"]["prompt_token_ids"] == params["prompt_token_ids"]
            assert again["kv_transfer_params"]["do_remote_decode"]


@pytest.mark.slow
@pytest.mark.parametrize("loses", [1, 2])
def test_a_stream_that_lacks_only_its_end_gets_it_from_the_router(routed, loses):
    here = routed()
    here.first.loses = loses
    for path in PATHS:
        for options in ({}, {"stream_options": {"include_usage": True}}):
            if loses == 2 and not options:
                continue  # the event before the last one has text
            got, alone = content(here.ask(path, **options)), content(here.alone(path, **options))
            assert got == alone
    assert here.second.bodies == []


REFUSED = {
    "two samples": {"n": 2},
    "logprobs": {"logprobs": 0},
    "seed": {"seed": 1},
    "frequency penalty": {"frequency_penalty": 0.5},
    "presence penalty": {"presence_penalty": 0.5},
    "grammar": {"structured_outputs": {"regex": "a+"}},
    "JSON": {"response_format": {"type": "json_object"}},
    "words": {"bad_words": ["a b"]},
    "long stop": {"stop": ["ab"]},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "echo": {"echo": True},
    "arguments": {"vllm_xargs": {"a": 1}},
    "unknown": {"a_new_field": 1},
    "no stream": {"stream": False},
}


@pytest.mark.parametrize("more", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_is_not_continued_if_its_rest_depends_on_more_than_its_tokens(path, more):
    assert not may_continue(path, body_of(path, **more))


@pytest.mark.parametrize(
    "more",
    [
        {
            "n": 1,
            "logprobs": None,
            "frequency_penalty": 0,
            "presence_penalty": 0.0,
            "stop": "\n",
            "tools": [],
        },
        {"temperature": 0, "seed": 1, "stop": ["\n", "."], "response_format": {"type": "text"}},
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "logit_bias": {"1": 2}, "user": "u"},
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_of_text_alone_is_continued(path, more):
    assert may_continue(path, body_of(path, **more))


def test_other_prompts_and_endpoints_are_not_continued():
    assert may_continue(PATHS[0], body_of(PATHS[0], prompt=[1, 2]))
    assert not may_continue(PATHS[0], body_of(PATHS[0], prompt=["a", "b"]))
    assert not may_continue(PATHS[0], body_of(PATHS[0], prompt=[]))
    assert not may_continue("/v1/messages", body_of(PATHS[1]))
    image = [{"type": "image_url", "image_url": {"url": "http://a"}}]
    assert not may_continue(PATHS[1], body_of(PATHS[1], messages=[{"role": "user", "content": image}]))


@pytest.mark.slow
@pytest.mark.parametrize("parser", ["swallows", "reasons"])
def test_a_stream_is_ended_with_an_error_if_a_parser_took_a_part_of_it(routed, parser):
    here = routed()
    setattr(here.first, parser, True)
    here.first.dies_after = 10
    assert b"engine_failed" in here.ask(PATHS[1])
    assert here.second.bodies == []
    assert here.alone(PATHS[1]).count(b'"delta":{}') == 0, (
        "vLLM sends this event only because of the token ids"
    )


@pytest.mark.slow
def test_an_engine_that_begins_anew_is_not_believed(routed):
    here = routed()
    here.second.keeps_prompt, here.first.dies_after = True, 10
    answer = here.ask(PATHS[1])
    assert b"it did not continue the answer" in answer
    text = "".join(re.findall(r'"content":"([^"]*)"', answer.decode()))
    assert len(text.split()) <= 10


@pytest.mark.slow
def test_an_engine_whose_parser_begins_anew_is_not_believed(routed):
    here = routed()
    here.second.reasons, here.first.dies_after = True, 10
    answer = here.ask(PATHS[1])
    assert b"its parser takes the rest" in answer
    assert b'"reasoning"' not in answer


@pytest.mark.slow
def test_a_stream_whose_second_engine_dies_too_ends_with_an_error(routed):
    here = routed()
    here.first.dies_after = here.second.dies_after = 10
    answer = here.ask(PATHS[0])
    assert b"engine_failed" in answer
    assert len(here.second.bodies) == 1
    wait_for(
        lambda: (
            'requests_total{outcome="failed",reason="broken"} 1.0' in here.scene.client.get("/metrics").text
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"continue_streams": False}, {"trust_kv_params": True}], ids=str)
def test_a_stream_ends_with_an_error_if_that_is_wanted(routed, kv, settings):
    here = routed(**settings)
    here.prefill.hands_over = kv
    here.first.dies_after = 10
    answer = here.ask(PATHS[0])
    assert b"engine_failed" in answer
    assert here.second.bodies == []
    assert "return_token_ids" not in here.first.bodies[0]


@pytest.mark.slow
def test_a_stream_is_not_continued_after_two_failures(routed):
    here = routed()
    here.prefill.status, here.first.dies_after = 500, 10
    assert b"engine_failed" in here.ask(PATHS[0])
    assert (here.second.bodies, here.second.asked_for_text) == ([], 0)
    assert "continued_streams_total 0.0" in here.scene.client.get("/metrics").text


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ({0: "whole"}, 3),
        ({0: "part\ufffd", 1: "part"}, 2),
        ({0: "part\ufffd</s>", 1: "part\ufffd", 2: "part"}, 1),
        ({0: "\ufffd\ufffd rest"}, 3),
        ({0: "\ufffd", 1: "\ufffd", 2: "", 3: "of the prompt"}, 0),
        ({0: "a\ufffdb", 1: "a\ufffd", 2: "a\ufffd", 3: "a\ufffd"}, None),
        ({0: None}, None),
    ],
)
def test_the_part_of_a_character_is_generated_again(text, kept):
    asked = []

    async def text_of(tokens: list[int]) -> str | None:
        asked.append(tokens)
        return text[len(asked) - 1]

    found = anyio.run(whole_characters, [*range(10, 30)], [1, 2, 3], 3, text_of)
    assert found == (None if kept is None else [1, 2, 3][:kept])
    assert all(len(one) == 8 for one in asked)


def test_a_text_about_token_ids_is_not_changed():
    said = {
        "text": '"token_ids":[1] "finish_reason":"abort" data: {"error" "delta":{}',
        "finish_reason": None,
    }
    event = b"data: " + json.dumps({"choices": [{**said, "token_ids": None}]}, separators=(",", ":")).encode()
    stream = Transcript(PATHS[0], body_of(PATHS[0]))
    assert stream.take(event + b"\n\n") == event + b"\n\n"
    assert not stream.finished
