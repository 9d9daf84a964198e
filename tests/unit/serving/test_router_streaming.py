"""Both engines are asked at once for a long prompt, if the prefill engine can be read from meanwhile."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.backends import Backend, Engines, StreamSource
from kvferry.tools.serving.router.completion import Completion
from kvferry.tools.serving.router.endpoint import Call
from kvferry.tools.serving.router.flow import CompletionFlow
from kvferry.tools.serving.router.metrics import RequestRecord
from kvferry.tools.serving.router.prefixes import Prefixes
from kvferry.tools.serving.router.settings import RouterSettings
from support.clock import Clock
from support.waiting import wait_for

pytestmark = pytest.mark.slow

OFFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p",
    "remote_host": "h",
    "remote_port": 5600,
    "remote_request_id": "0" * 32,
    "remote_num_tokens": 7,
    "remote_step_tokens": 100,
    "remote_sealed_grant": "c2VhbGVk",
}
NOTHING = {"do_remote_prefill": False, "do_remote_decode": False, "remote_num_tokens": 0}
LONG = list(range(101))


def acquainted(scene: Any) -> Any:
    """The router has had two answers of every prefill engine."""
    for _ in [*scene.prefill, *scene.prefill]:
        assert scene.complete().status_code == 200
    for engine in (*scene.prefill, *scene.decode):
        engine.raw.clear()
    return scene


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests."""
    with ThreadPoolExecutor() as threads:
        yield threads


@pytest.fixture
def pair(stage, fake):
    return acquainted(stage([fake(hands_over=OFFER)], [fake()]))


def tickets(engine: Any) -> list[Any]:
    return [body["kv_transfer_params"].get("remote_request_id") for body in engine.bodies]


def test_decode_engine_is_asked_while_the_prefill_engine_computes(pair, background):
    pair.prefill[0].delay_seconds = pair.decode[0].delay_seconds = 3600.0
    request = background.submit(pair.complete, prompt=LONG, n=2)
    wait_for(lambda: pair.prefill[0].raw and pair.decode[0].raw)
    pair.decode[0].delay_seconds = 0.0
    assert request.result().status_code == 200
    (asked,), (told,) = pair.prefill[0].bodies, pair.decode[0].bodies
    (ticket,) = tickets(pair.prefill[0])
    assert re.fullmatch("[0-9a-f]{32}", ticket)
    expected = {**OFFER, "remote_request_id": ticket, "remote_num_tokens": None}
    del expected["remote_sealed_grant"]  # of another ticket
    assert told["kv_transfer_params"] == expected
    assert (asked["max_tokens"], asked["kv_transfer_params"]["do_remote_decode"]) == (1, True)
    assert (told["n"], told["prompt"]) == (2, LONG)


def test_every_prompt_has_its_own_ticket(pair):
    pair.decode[0].delay_seconds = 0.1
    for _ in range(50):  # the router may still count the request before at the prefill engine
        pair.complete(prompt=LONG)
        both = zip(tickets(pair.prefill[0]), tickets(pair.decode[0]), strict=True)
        streamed = [(there, here) for there, here in both if there is not None]
        if len(streamed) == 3:
            break
    assert all(there == here for there, here in streamed)
    assert len(set(streamed)) == 3


@pytest.mark.parametrize(
    "change",
    [{"remote_step_tokens": 0}, {"remote_step_tokens": "many"}, {"remote_step_tokens": 101}],
    ids=str,
)
def test_engines_are_asked_one_after_the_other_if_streaming_gains_nothing(stage, fake, change):
    scene = acquainted(stage([fake(hands_over={**OFFER, **change})], [fake()]))
    scene.complete(prompt=LONG)
    assert tickets(scene.prefill[0]) == [None]
    assert tickets(scene.decode[0]) == [OFFER["remote_request_id"]]


def test_prompt_that_would_queue_at_the_prefill_engine_is_not_streamed(pair, background):
    pair.prefill[0].delay_seconds = 3600.0
    requests = []
    for prompt in ("x", LONG):
        requests.append(background.submit(pair.complete, prompt=prompt))
        wait_for(lambda: len(pair.prefill[0].raw) == len(requests))
    pair.prefill[0].delay_seconds = 0.0
    assert [request.result().status_code for request in requests] == [200, 200]
    assert tickets(pair.prefill[0]) == [None, None]


@pytest.mark.parametrize("stream", [False, True])
def test_failed_prefill_is_tried_elsewhere_before_the_answer_begins(stage, fake, background, stream):
    bad, good, decode = fake(hands_over=OFFER), fake(hands_over=OFFER), fake()
    scene = acquainted(stage([bad, good], [decode]))
    bad.status, decode.delay_seconds = 500, 3600.0
    request = background.submit(scene.complete, prompt=LONG, stream=stream)
    wait_for(lambda: decode.aborted == 1)
    decode.delay_seconds = 0.0
    assert request.result().status_code == 200
    assert tickets(good) == [None]
    assert tickets(decode)[-1] == OFFER["remote_request_id"]


def test_failed_prefill_changes_nothing_once_the_answer_has_begun(stage, fake):
    bad, good = fake(hands_over=OFFER), fake(hands_over=OFFER)
    scene = acquainted(stage([bad, good], [fake()], clock=Clock()))
    bad.status = 500
    bad.delay_seconds = scene.decode[0].event_seconds = 3600.0
    body = {"prompt": LONG, "stream": True}
    with scene.client.stream("POST", "/v1/completions", json=body) as answer:
        events = answer.iter_text()
        text = next(events)
        bad.delay_seconds = 0.0
        resting = f'engine_state{{role="prefill",state="resting",url="{bad.url}"}} 1.0'
        wait_for(lambda: resting in scene.client.get("/metrics").text)
        scene.decode[0].event_seconds = 0.0
        text += "".join(events)
    assert text.endswith("data: [DONE]\n\n")
    assert "error" not in text
    assert good.raw == []


def test_decode_engine_has_the_last_word_if_the_prefill_engine_refuses(stage, fake, background):
    scene = acquainted(stage([fake(hands_over=OFFER), fake(hands_over=OFFER)], [decode := fake()]))
    for prefill in scene.prefill:
        prefill.status = 404
    decode.delay_seconds = 3600.0
    request = background.submit(scene.complete, prompt=LONG)
    wait_for(lambda: decode.aborted == 1)
    decode.status, decode.delay_seconds = 404, 0.0
    answer = request.result()
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no such model")
    assert "kv_transfer_params" not in decode.bodies[-1]
    assert sum(len(prefill.raw) for prefill in scene.prefill) == 1


def test_request_with_invalid_limits_is_not_streamed(pair):
    pair.complete(prompt=LONG, min_tokens=6)
    assert pair.prefill[0].raw == []
    assert "kv_transfer_params" not in pair.decode[0].bodies[0]


def test_request_is_given_up_after_two_failures(stage, fake):
    prefill, decode = [fake(hands_over=OFFER) for _ in range(3)], [fake(), fake()]
    scene = acquainted(stage(prefill, decode))
    for engine in prefill:
        engine.status = 500
    for engine in decode:
        engine.delay_seconds = 3600.0
    answer = scene.complete(prompt=LONG)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert sum(len(engine.raw) for engine in prefill) == 2


def test_next_decode_engine_computes_the_prompt_if_one_fails(stage, fake, background):
    prefill, bad, good = fake(hands_over=OFFER), fake(), fake()
    scene = acquainted(stage([prefill], [bad, good], clock=Clock()))
    bad.status = 500
    idle = f'engine_requests{{role="prefill",url="{prefill.url}"}} 0.0'
    for number in (1, 2):  # one of them meets the bad engine first
        bad.delay_seconds = good.delay_seconds = 3600.0
        request = background.submit(scene.complete, prompt=LONG)
        wait_for(lambda sent=number: len(prefill.raw) == sent)
        wait_for(lambda: idle in scene.client.get("/metrics").text)
        bad.delay_seconds = good.delay_seconds = 0.0
        assert request.result().status_code == 200
    (failed,) = bad.bodies
    assert failed["kv_transfer_params"]["remote_num_tokens"] is None
    assert sum("kv_transfer_params" not in body for body in good.bodies) == 1


def test_prompt_without_an_offer_of_kv_is_computed_at_once(pair, background):
    pair.prefill[0].hands_over, pair.decode[0].delay_seconds = NOTHING, 3600.0
    request = background.submit(pair.complete, prompt=LONG)
    wait_for(lambda: pair.decode[0].aborted == 1)
    pair.decode[0].delay_seconds = 0.0
    assert request.result().status_code == 200
    streamed, alone = pair.decode[0].bodies
    assert streamed["kv_transfer_params"]["remote_num_tokens"] is None
    assert "kv_transfer_params" not in alone


@dataclass
class Answer:
    """An engine's answer without a connection."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.body


def test_client_gets_one_answer_if_a_prefill_fails_just_as_the_decode_engine_answers():
    sent, moment = [], anyio.Event()

    class Client:
        """The decode engine's answer is on its way when the prefill engine has failed."""

        @asynccontextmanager
        async def opened(self, method, backend, path, headers=(), body=b"") -> AsyncIterator[Answer]:
            if path == "/health":
                await anyio.lowlevel.checkpoint()
                moment.set()
                yield Answer(200, b"")
            elif backend.role == "prefill":
                yield Answer(500, b"{}")
            elif b"kv_transfer_params" in body:
                await moment.wait()
                yield Answer(200, b"streamed")
            else:
                yield Answer(200, b"alone")

    async def send(message: Any) -> None:
        sent.append(message.get("body"))

    settings = RouterSettings(prefill=("http://p",), decode=("http://d",))
    engines = Engines(settings.prefill, settings.decode)
    for backend in engines.known:
        backend.mark_up()
    for _ in range(2):
        engines.prefill.backends[0].note_hand_over(OFFER)
    flow = CompletionFlow(settings, engines, Client(), Prefixes(engines, 1.0))  # type: ignore[arg-type]
    call = Call("POST", "/v1/completions", "", (), (), b"", RequestRecord())
    anyio.run(flow.complete, Completion(call, {"prompt": LONG}, send))
    assert [body for body in sent if body] == [b"alone"]


def backend_with(*offers: dict[str, Any]) -> Backend:
    backend = Backend(Role.PREFILL, "http://p")
    for offer in offers:
        backend.note_hand_over(offer)
    return backend


def test_stream_source_is_known_by_two_equal_offers_until_the_engine_is_down():
    backend = backend_with(OFFER, OFFER)
    assert backend.stream_source == StreamSource.of(OFFER)
    backend.mark_down("gone")
    assert backend.stream_source is None
    assert backend_with().stream_source is None
    assert backend_with(OFFER).stream_source is None, "another engine may be the next to answer"


def test_several_engines_behind_one_url_are_no_stream_source():
    assert backend_with(OFFER, {**OFFER, "remote_port": 5601}, OFFER).stream_source is None
    assert backend_with(OFFER, NOTHING, OFFER).stream_source is None, "it must answer twice again"
    assert backend_with(OFFER, NOTHING, OFFER, OFFER).stream_source == StreamSource.of(OFFER)
