"""Prompts whose hand-over would cost more than it saves."""

from __future__ import annotations

import sys

import pytest

from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.backends import Backend
from kvferry.tools.serving.router.prompts import PromptPrefix, Turns, estimated_tokens, has_media
from support.waiting import wait_for

CHAT = "/v1/chat/completions"


def user(content):
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": [1, 2, 3]}, 3),
        ({"prompt": [[1, 2]]}, 2),
        ({"prompt": "x" * 40}, 10),
        ({"prompt": ["x" * 41]}, 11),
        ({"prompt": "\u6f22" * 40}, 30),
        ({"prompt": "\ud800"}, 1),
        ({"messages": [{"content": [{"type": "text", "text": "x" * 24}]}]}, 7),
        ({"messages": [{"content": [{"image_url": {"url": "x" * 4000}}]}]}, 0),
        ({"messages": [{"content": None, "n": 7}]}, 0),
        ({"messages": [], "system": "x" * 38}, 10),
        ({"messages": [], "tools": [{"function": {"parameters": {"x" * 400: 1}}}]}, 110),
        ({}, 0),
    ],
)
def test_the_length_of_a_prompt_is_estimated(body, tokens):
    assert estimated_tokens(body) == tokens


@pytest.mark.parametrize(
    ("content", "media"),
    [
        ("x", False),
        (None, False),
        ([{"type": "text", "text": "x"}], False),
        ([{"type": "tool_result", "content": [{"type": "text", "text": "x"}]}], False),
        ([{"type": "tool_result", "content": [{"type": "image", "source": {"url": "x"}}]}], True),
        ([{"type": "image_url", "image_url": {"url": "x"}}], True),
        ([{"image": "x"}], True),
        ([{"type": ["text"]}], True),
    ],
)
def test_parts_other_than_text_are_recognised(content, media):
    assert has_media({"messages": [user("hi"), user(content)]}) is media


FIRST = [user("a"), {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("before", "after", "added"),
    [
        ({"prompt": "ab"}, {"prompt": "ab" + "c" * 14}, 3),
        ({"prompt": [1, 2]}, {"prompt": [1, 2, 3]}, 1),
        ({"prompt": [1, 2]}, {"prompt": [[1, 2, 3]]}, 1),
        ({"prompt": [1, 2]}, {"prompt": [1, 23, 4]}, None),
        ({"prompt": [1, 2]}, {"prompt": [1]}, None),
        ({"prompt": "ab"}, {"prompt": "abab", "model": "other"}, None),
        ({"prompt": "ab"}, {"prompt": "ab", "cache_salt": "s"}, None),
        ({"messages": FIRST}, {"messages": [*FIRST, user("x" * 40)]}, 11),
        ({"messages": FIRST}, {"messages": [user("a"), user("b"), user("c")]}, None),
        ({"messages": FIRST}, {"messages": FIRST, "tools": [{}]}, None),
        ({"prompt": FIRST}, {"messages": FIRST}, None),
    ],
)
def test_a_prompt_that_begins_with_an_earlier_one_adds_its_rest(before, after, added):
    assert PromptPrefix.of(CHAT, before).new_tokens(CHAT, after) == added


def test_only_the_engine_that_got_the_prompt_and_was_not_down_since_has_it():
    turns, body = Turns(max_sessions=2), {"prompt": "x" * 400}
    engine, other = Backend(Role.DECODE, "http://a:1"), Backend(Role.DECODE, "http://b:1")
    for session in (1, 2, 1, 3):
        turns.remember(session, engine, CHAT, body)
    found = [turns.new_tokens(session, engine, CHAT, body) for session in (1, 2, 3)]
    assert found == [0, None, 0], "the session that was used least recently is forgotten"
    assert turns.new_tokens(1, other, CHAT, body) is None
    engine.mark_down("gone")
    engine.mark_up()
    assert turns.new_tokens(1, engine, CHAT, body) is None


def alone(scene) -> int:
    """Number of completions that went to a decode engine alone."""
    bodies = [body for engine in scene.decode for body in engine.bodies if "prompt" in body]
    return sum("kv_transfer_params" not in body for body in bodies)


@pytest.mark.slow
def test_a_short_prompt_goes_to_decode_alone(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake()], min_prefill_tokens=10)
    scene.complete(prompt="x" * 36)
    scene.complete(prompt=[1] * 9)
    assert alone(scene) == 2
    scene.complete(prompt="x" * 37)
    scene.complete(prompt=[1] * 10)
    image = {"type": "image_url", "image_url": {"url": "x"}}
    scene.complete("/v1/chat/completions", prompt="x", messages=[user([image])])
    assert alone(scene) == 2
    assert 'outcome="decode",reason="short"} 2.0' in scene.client.get("/metrics").text


@pytest.mark.slow
def test_a_turn_that_adds_little_goes_to_the_decode_engine_that_has_the_rest(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake() for _ in range(3)], min_prefill_tokens=10)
    text = "x" * 400
    assert scene.complete(prompt=text, user="one").status_code == 200
    scene.complete(prompt=text + "y" * 40, user="one")
    assert alone(scene) == 0, "it adds ten tokens"
    scene.client.post("/v1/embeddings", json={"input": "x", "user": "one"})
    scene.complete(prompt=text + "y" * 60, user="one", temperature=0.5)
    assert alone(scene) == 1
    scene.complete(prompt=text + "y" * 60, user="two")
    scene.complete(prompt="z" + text + "y" * 60, user="one")
    assert alone(scene) == 1
    own = next(engine for engine in scene.decode if len(engine.raw) > 1)
    own.healthy = False
    wait_for(lambda: not all(engine["up"] for engine in scene.client.get("/health").json()["decode"]))
    scene.complete(prompt="z" + text + "y" * 60, user="one")
    assert alone(scene) == 1, "another engine does not have it"
    wait_for(lambda: 'outcome="decode",reason="known"} 1.0' in scene.client.get("/metrics").text)


@pytest.mark.slow
def test_every_prompt_is_handed_over_without_a_limit(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake()])
    for _ in range(2):
        scene.complete(prompt="x", user="one")
    assert alone(scene) == 0


@pytest.mark.slow
@pytest.mark.parametrize("field", ["tools", "messages"])
def test_a_deeply_nested_prompt_is_relayed_or_refused(stage, fake, kv, field):
    scene = stage([fake(hands_over=kv)], [fake()], min_prefill_tokens=10)
    limit = sys.getrecursionlimit()
    for depth in (100, *range(limit - 120, limit, 7), 10 * limit):
        raw = b'{"user": "one", "%s": ' % field.encode() + b"[" * depth + b"]" * depth + b"}"
        answer = scene.client.post("/v1/chat/completions", content=raw)
        assert answer.status_code in (200, 400), depth
