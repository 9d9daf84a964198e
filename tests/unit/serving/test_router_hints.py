"""Engines are told which others have a prefix of a prompt, from the events of vLLM's own publisher."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

from support.kv_events import stored
from support.waiting import wait_for

pytestmark = pytest.mark.slow

BLOCK = 16
TOKENS = list(range(1000, 1640))
LONG = "The sea is wide and blue. " * 60
FIRST, SECOND = "10.0.0.1:5700", "10.0.0.2:5700"


@pytest.fixture
def publishing(fake, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes an engine with a fleet tier that publishes its blocks, and tokenises every prompt as `TOKENS`."""
    with contextlib.ExitStack() as stack:

        class Publishing(fake):
            address = ""
            tokenized: list[dict[str, Any]]
            rendered: list[tuple[str, dict[str, Any]]]
            renders = True
            tokens: Any = TOKENS

            def app(self) -> Starlette:
                routes = [
                    Route("/kv_event_sources", self.sources),
                    Route("/metrics", self.page),
                    Route("/tokenize", self.tokenize, methods=["POST"]),
                    Route("/v1/{of}/render", self.render, methods=["POST"]),
                ]
                return Starlette(routes=[*routes, *super().app().routes])

            async def sources(self, _: Request) -> Response:
                source = {"endpoint": self.endpoint, "replay_endpoint": f"{self.endpoint}-replay"}
                return JSONResponse({"0": source})

            async def page(self, _: Request) -> Response:
                labels = f'address="{self.address}",engine="0",model_name="m"'
                return PlainTextResponse(f"kvferry_fleet_info{{{labels}}} 1.0\n" if self.address else "")

            async def tokenize(self, request: Request) -> Response:
                self.tokenized.append(await request.json())
                return (
                    self.tokens
                    if isinstance(self.tokens, Response)
                    else JSONResponse({"tokens": self.tokens})
                )

            async def render(self, request: Request) -> Response:
                self.rendered.append((request.path_params["of"], await request.json()))
                return JSONResponse({"token_ids": self.tokens}) if self.renders else Response(status_code=404)

            def publish(self, tokens: list[int], **more: Any) -> None:
                self.publisher.publish(KVEventBatch(ts=0.0, events=[stored(tokens, BLOCK, **more)]))

        def make(address: str = "", tokens: int = 0, **more: Any) -> Publishing:
            engine = Publishing(**more)
            engine.address, engine.tokenized, engine.rendered = address, [], []
            engine.endpoint = f"ipc://{tmp_path}/{id(engine)}"
            engine.publisher = ZmqEventPublisher(
                0, endpoint=engine.endpoint, replay_endpoint=f"{engine.endpoint}-replay"
            )
            stack.callback(engine.publisher.shutdown)
            if tokens:
                engine.publish(TOKENS[:tokens])
            return engine

        yield make


@pytest.fixture
def ready(stage) -> Callable[..., Any]:
    """Sets up a scene of decode engines, and waits until the router knows so many blocks, and addresses."""

    def set_up(*engines: Any, blocks: int, prefill: tuple[Any, ...] = (), **settings: Any) -> Any:
        scene = stage([*(prefill or engines)], [*engines], **settings)
        named = {engine.address for engine in engines if engine.address}
        wait_for(lambda: known(scene) == (blocks, named), seconds=15)
        return scene

    return set_up


def known(scene: Any) -> tuple[float, set[str]]:
    """Number of blocks that the router knows, and addresses of engines."""
    page = scene.client.get("/metrics").text
    found = re.findall(r'^kvferry_router_known_blocks\{address="(.*?)",.*\} (.*)', page, re.MULTILINE)
    return sum(float(blocks) for _, blocks in found), {address for address, _ in found if address}


def session_of(scene: Any, engine: Any) -> str:
    """A session whose requests go to a decode engine."""

    def goes_there(session: str) -> bool:
        before = engine.asked
        scene.complete(user=session)
        return engine.asked > before

    return next(name for number in range(100) if goes_there(name := f"session {number}"))


def asked(
    scene: Any, engine: Any, session: str, path: str = "/v1/completions", **body: Any
) -> dict[str, Any]:
    """What an engine gets of a request of its session."""
    whole = {"model": "m", "max_tokens": 5, "user": session, **body}
    assert scene.client.post(path, json=whole).status_code == 200
    return engine.bodies[-1]


def hint(body: dict[str, Any]) -> list[str] | None:
    return (body.get("kv_transfer_params") or {}).get("remote_caches")


def test_the_engine_that_gets_a_prompt_is_told_who_has_its_longest_prefix(publishing, ready):
    first, second, third = publishing(FIRST, 512), publishing(SECOND, 640), publishing()
    scene = ready(first, second, third, blocks=72)
    session = session_of(scene, third)
    assert hint(asked(scene, third, session, prompt=TOKENS)) == [SECOND]
    both = hint(asked(scene, third, session, prompt=[*TOKENS[:520], 1, *TOKENS[521:]]))
    assert sorted(both) == [FIRST, SECOND]
    assert hint(asked(scene, third, session, prompt=[1, *TOKENS[1:]])) is None
    assert hint(asked(scene, third, session, prompt=TOKENS, cache_salt="another tenant")) is None
    assert hint(asked(scene, second, session_of(scene, second), prompt=TOKENS)) is None
    assert not any(engine.tokenized for engine in scene.decode)
    assert "kvferry_router_hinted_requests_total 2.0" in scene.client.get("/metrics").text


def test_an_engine_tokenises_texts_and_chats(publishing, ready):
    holder, other = publishing(FIRST, 640), publishing()
    scene = ready(holder, other, blocks=40)
    session = session_of(scene, other)
    chat = {"messages": [{"role": "user", "content": LONG}], "tools": [], "chat_template_kwargs": {"a": 1}}
    assert hint(asked(scene, other, session, "/v1/chat/completions", **chat)) == [FIRST]
    assert hint(asked(scene, other, session, prompt=LONG, add_special_tokens=False)) == [FIRST]
    assert other.tokenized == [
        {"model": "m", **chat},
        {"model": "m", "prompt": LONG, "add_special_tokens": False},
    ]
    other.tokenized.clear()
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    for path, body in (
        ("/v1/completions", {"prompt": "short"}),
        ("/v1/completions", {"prompt": [LONG, LONG]}),
        ("/v1/completions", {"prompt": LONG, "prompt_logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [image, LONG]}]}),
    ):
        assert hint(asked(scene, other, session, path, **body)) is None
    assert not other.tokenized


@pytest.fixture
def told(publishing, ready) -> tuple[Any, Callable[..., Any]]:
    """An engine beside the one that has a prompt, and a function: the hint that it gets with a request."""
    holder, other = publishing(FIRST, 640), publishing()
    scene = ready(holder, other, blocks=40)
    session = session_of(scene, other)
    return other, lambda path, **body: hint(asked(scene, other, session, path, **body))


MESSAGES = {"system": "Be brief.", "messages": [{"role": "user", "content": LONG}]}
RESPONSE = {"instructions": "Be brief.", "input": LONG}


def test_an_engine_renders_messages_and_responses_as_it_does_to_serve_them(told):
    other, hinted = told
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": LONG}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "7"},
    ]
    assert hinted("/v1/messages", **MESSAGES) == [FIRST]
    assert hinted("/v1/responses", **RESPONSE) == [FIRST]
    assert hinted("/v1/responses", input=items) == [FIRST]
    assert [of for of, _ in other.rendered] == ["messages", "responses", "responses"]
    for (_, body), sent in zip(other.rendered, (MESSAGES, RESPONSE, {"input": items}), strict=True):
        assert sent.items() <= body.items()
    other.rendered.clear()
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}
    assert hinted("/v1/responses", input=[*items, image]) is None
    assert hinted("/v1/responses", input="short") is None
    assert hinted("/v1/embeddings", input=LONG) is None
    assert not other.rendered
    assert not other.tokenized


def test_an_engine_that_does_not_render_is_asked_once(told):
    other, hinted = told
    other.renders = False
    for _ in range(2):
        assert hinted("/v1/messages", **MESSAGES) is None
    assert hinted("/v1/responses", **RESPONSE) is None
    assert [of for of, _ in other.rendered] == ["messages", "responses"]


@pytest.mark.parametrize(
    "tokens",
    [["a", "b"], [-1], None, 7, JSONResponse([1]), PlainTextResponse("no JSON"), Response(status_code=404)],
)
def test_a_request_goes_on_without_tokens(publishing, ready, tokens):
    holder, other = publishing(FIRST, 640), publishing()
    scene = ready(holder, other, blocks=40)
    other.tokens = tokens
    assert hint(asked(scene, other, session_of(scene, other), prompt=LONG)) is None
    assert len(other.tokenized) == 1


def test_a_prefill_engine_is_told_and_a_decode_engine_with_its_kv_is_not(publishing, ready, kv):
    holder, decode, prefill = publishing(FIRST, 640), publishing(), publishing(hands_over=kv)
    scene = ready(holder, decode, blocks=40, prefill=(prefill,))
    assert asked(scene, decode, session_of(scene, decode), prompt=TOKENS)["kv_transfer_params"] == kv
    assert hint(prefill.bodies[-1]) == [FIRST]
    assert prefill.bodies[-1]["kv_transfer_params"]["do_remote_decode"] is True


def test_a_lost_engine_is_forgotten_and_followed_again_when_it_is_back(publishing, ready):
    holder, other = publishing(FIRST, 640), publishing()
    scene = ready(holder, other, blocks=40)
    session = session_of(scene, other)
    holder.healthy = False
    wait_for(lambda: known(scene) == (0, set()))
    assert hint(asked(scene, other, session, prompt=TOKENS)) is None
    holder.address, holder.healthy = SECOND, True  # another run of the engine
    wait_for(lambda: hint(asked(scene, other, session, prompt=TOKENS)) == [SECOND])


def test_of_engines_that_are_equally_busy_the_one_with_the_longest_prefix_is_chosen(publishing, ready):
    engines = [publishing(FIRST, 512), holder := publishing(SECOND, 640), publishing()]
    scene = ready(*engines, blocks=72)
    for _ in range(4):
        assert scene.complete(prompt=TOKENS).status_code == 200
    assert holder.asked == 4
    for _ in range(6):
        assert scene.complete(prompt=[1, *TOKENS]).status_code == 200
    assert min(engine.asked for engine in engines) >= 2


def test_the_next_turn_of_a_session_costs_nothing(publishing, ready):
    holder, other = publishing(FIRST, 640), publishing()
    scene = ready(holder, other, blocks=40, min_prefill_tokens=1)
    session = session_of(scene, other)
    asked(scene, other, session, prompt=LONG)
    asked(scene, other, session, prompt=f"{LONG} and more")
    assert len(other.tokenized) == 1


def test_a_router_that_is_told_so_follows_no_events(publishing, stage):
    holder, other = publishing(FIRST, 640), publishing()
    scene = stage([holder, other], [holder, other], follow_events=False)
    session = session_of(scene, other)
    for _ in range(8):
        assert hint(asked(scene, other, session, prompt=LONG)) is None
    assert known(scene) == (0, set())
    assert not other.tokenized
