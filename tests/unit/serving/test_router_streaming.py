"""Both engines are asked at once for a long prompt, if the prefill engine can be read from meanwhile."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kvferry.serving.router.backends import Backend
from kvferry.serving.router.failures import Failures
from kvferry.serving.router.flow import Completion, CompletionFlow
from kvferry.serving.router.streaming import StreamSource

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
def pair(stage, fake):
    return acquainted(stage([fake(hands_over=OFFER)], [fake()]))


def tickets(engine: Any) -> list[Any]:
    return [body["kv_transfer_params"].get("remote_request_id") for body in engine.bodies]


def test_the_decode_engine_is_asked_while_the_prefill_engine_computes(pair):
    # An answer at once might come before the prefill engine has its request.
    pair.prefill[0].delay_seconds, pair.decode[0].delay_seconds = 60.0, 0.5
    before = time.monotonic()
    assert pair.complete(prompt=LONG, n=2).status_code == 200
    assert time.monotonic() - before < 50.0
    (asked,), (told,) = pair.prefill[0].bodies, pair.decode[0].bodies
    (ticket,) = tickets(pair.prefill[0])
    assert re.fullmatch("[0-9a-f]{32}", ticket)
    expected = {**OFFER, "remote_request_id": ticket, "remote_num_tokens": None}
    assert told["kv_transfer_params"] == expected
    assert (asked["max_tokens"], asked["kv_transfer_params"]["do_remote_decode"]) == (1, True)
    assert (told["n"], told["prompt"]) == (2, LONG)


def test_every_prompt_has_a_ticket_of_its_own(pair):
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
def test_engines_are_asked_one_after_the_other_where_nothing_is_gained(stage, fake, change):
    scene = acquainted(stage([fake(hands_over={**OFFER, **change})], [fake()]))
    scene.complete(prompt=LONG)
    assert tickets(scene.prefill[0]) == [None]
    assert tickets(scene.decode[0]) == [OFFER["remote_request_id"]]


def test_a_prompt_that_would_queue_is_not_waited_for_by_a_decode_engine(pair):
    pair.prefill[0].delay_seconds = 0.5
    busy = threading.Thread(target=pair.complete)
    busy.start()
    while not pair.prefill[0].raw:
        time.sleep(0.01)
    pair.complete(prompt=LONG)
    busy.join()
    assert tickets(pair.prefill[0]) == [None, None]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefill_that_fails_is_tried_elsewhere_if_the_client_has_nothing_yet(
    stage, fake, eventually, stream
):
    bad, good, decode = fake(hands_over=OFFER), fake(hands_over=OFFER), fake()
    scene = acquainted(stage([bad, good], [decode]))
    bad.status, decode.delay_seconds = 500, 0.5
    assert scene.complete(prompt=LONG, stream=stream).status_code == 200
    eventually(lambda: decode.aborted == 1)
    assert tickets(good) == [None]
    assert tickets(decode)[-1] == OFFER["remote_request_id"]


def test_a_prefill_that_fails_after_the_answer_has_begun_changes_nothing(stage, fake):
    bad, good = fake(hands_over=OFFER), fake(hands_over=OFFER)
    scene = acquainted(stage([bad, good], [fake()]))
    bad.status, bad.delay_seconds = 500, 0.3
    scene.decode[0].event_seconds = 0.2
    answer = scene.complete(prompt=LONG, stream=True)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert "error" not in answer.text
    assert good.raw == []


def test_what_a_prefill_engine_rejects_is_what_the_client_gets(pair):
    pair.prefill[0].status, pair.decode[0].delay_seconds = 404, 5.0
    answer = pair.complete(prompt=LONG)
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no such model")


def test_two_failures_of_engines_are_enough(stage, fake):
    prefill, decode = [fake(hands_over=OFFER) for _ in range(3)], [fake(), fake()]
    scene = acquainted(stage(prefill, decode))
    for engine in prefill:
        engine.status = 500
    for engine in decode:
        engine.delay_seconds = 5.0
    answer = scene.complete(prompt=LONG)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert sum(len(engine.raw) for engine in prefill) == 2


def test_a_decode_engine_that_fails_is_replaced_by_one_that_computes(stage, fake, monkeypatch):
    monkeypatch.setattr("kvferry.serving.router.backends._FIRST_REST_SECONDS", 3600.0)
    monkeypatch.setattr("kvferry.serving.router.backends._LONGEST_REST_SECONDS", 3600.0)
    bad, good = fake(), fake()
    scene = acquainted(stage([fake(hands_over=OFFER)], [bad, good]))
    bad.status = 500
    bad.delay_seconds = good.delay_seconds = 0.5  # the prefill engine is idle when they answer
    for _ in range(2):  # one of them meets the bad engine first
        assert scene.complete(prompt=LONG).status_code == 200
    (failed,) = bad.bodies
    assert failed["kv_transfer_params"]["remote_num_tokens"] is None
    assert sum("kv_transfer_params" not in body for body in good.bodies) == 1


def test_a_prompt_whose_kv_is_not_offered_is_computed_at_once(pair):
    pair.prefill[0].hands_over, pair.decode[0].delay_seconds = NOTHING, 1.0
    assert pair.complete(prompt=LONG).status_code == 200
    streamed, alone = pair.decode[0].bodies
    assert streamed["kv_transfer_params"]["remote_num_tokens"] is None
    assert "kv_transfer_params" not in alone


def test_the_client_gets_one_answer_if_both_engines_answer_at_the_same_moment():
    """The decode engine's answer is on its way to the client when the prefill engine has failed."""
    sent, moment = [], anyio.Event()

    async def prefilled(*_: Any) -> None:
        await anyio.lowlevel.checkpoint()
        moment.set()

    async def answer(completion: Any, params: Any, failures: Any, send: Any) -> None:
        if params is not None:
            await moment.wait()
        await send("streamed" if params is not None else "alone")

    async def send(message: str) -> None:
        sent.append(message)

    async def main() -> bool:
        flow = object.__new__(CompletionFlow)
        flow._prefilled, flow._answer = prefilled, answer  # type: ignore[method-assign, assignment]
        body = {"prompt": LONG}
        asked = Completion(path="/v1/completions", headers=[], body=body, reply_headers=[])
        return await flow._streamed(
            asked, Backend("prefill", "http://p"), StreamSource.of(OFFER), Failures(), send
        )

    assert anyio.run(main) is False, "the next prefill engine is asked"
    assert sent == []


def backend_with(*offers: dict[str, Any]) -> Backend:
    backend = Backend("prefill", "http://p")
    for offer in offers:
        backend.note_hand_over(offer)
    return backend


def test_an_engine_is_known_by_its_offers_until_it_is_down():
    backend = backend_with(OFFER, OFFER)
    assert backend.stream_source == StreamSource.of(OFFER)
    backend.mark_down("gone")
    assert backend.stream_source is None
    assert backend_with().stream_source is None
    assert backend_with(OFFER).stream_source is None, "another engine may be the next to answer"


def test_several_engines_behind_one_url_are_not_told_apart():
    assert backend_with(OFFER, {**OFFER, "remote_port": 5601}, OFFER).stream_source is None
    assert backend_with(OFFER, NOTHING, OFFER).stream_source is None, "it must answer twice again"
    assert backend_with(OFFER, NOTHING, OFFER, OFFER).stream_source == StreamSource.of(OFFER)
