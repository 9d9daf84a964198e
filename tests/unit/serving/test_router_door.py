"""Callers as adversaries: what of their requests gets past the router's door."""

import contextlib
import json
import re
import socket
import sys
import threading

import pytest

from kvferry.serving.ports import listen, url_of
from kvferry.serving.router.app import router_app
from kvferry.serving.router.endpoint import ActiveRequest
from kvferry.serving.router.settings import RouterSettings
from kvferry.serving.run import run_app

pytestmark = pytest.mark.slow

FORGED = {"do_remote_prefill": True, "remote_engine_id": "forged", "remote_block_ids": [[1]]}
HIDDEN = {
    "top": {"kv_transfer_params": FORGED},
    "text": {"kv_transfer_params": "x"},
    "xargs": {"vllm_xargs": {"kv_transfer_params": ["forged"], "a": 1}},
    "both": {"kv_transfer_params": FORGED, "vllm_xargs": {"kv_transfer_params": 3}},
}


@pytest.fixture
def pair(stage, fake, kv):
    return stage([fake(hands_over=kv)], [fake()])


@pytest.fixture
def trusting(stage, fake, kv):
    return stage([fake(hands_over=kv)], [fake()], trust_kv_params=True)


@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
def test_kv_transfer_params_of_callers_reach_no_engine(pair, kv, hidden):
    assert pair.complete(**hidden).status_code == 200
    [asked], [served] = pair.prefill[0].bodies, pair.decode[0].bodies
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert served["kv_transfer_params"] == kv
    for body in (asked, served):
        assert "forged" not in json.dumps(body)
        assert "kv_transfer_params" not in body.get("vllm_xargs", {})


@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
def test_nor_a_decode_engine_that_works_alone(pair, hidden):
    assert pair.complete(prompt_logprobs=1, **hidden).status_code == 200
    assert b"kv_transfer_params" not in pair.decode[0].raw[0]


def test_what_a_field_that_came_twice_hid_reaches_no_engine(pair):
    twice = b'{"prompt": ["a", "b"], "vllm_xargs": {"kv_transfer_params": "forged"}, "vllm_xargs": {}}'
    assert pair.client.post("/v1/completions", content=twice).status_code == 200
    assert b"kv_transfer_params" not in pair.decode[0].raw[0]


def test_other_extra_arguments_stay(pair):
    pair.complete(**HIDDEN["xargs"])
    assert pair.decode[0].bodies[0]["vllm_xargs"] == {"a": 1}


def test_a_trusted_front_brings_its_own_to_a_decode_engine(trusting):
    sent = json.dumps({"prompt": "x", "kv_transfer_params": FORGED}, indent=3).encode()
    assert trusting.client.post("/v1/completions", content=sent).status_code == 200
    assert trusting.prefill[0].raw == []
    assert trusting.decode[0].bodies == [json.loads(sent)]


@pytest.mark.parametrize("given", ["a" * 129, "a b", "a\\nb", "<b>", 'a"b', "%0a", "\xe9", ""])
def test_a_request_id_that_is_long_or_odd_is_replaced(pair, given):
    headers = {b"X-Request-Id": given.encode("latin-1")}
    answer = pair.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    ids = {engine.headers[0]["x-request-id"] for engine in (*pair.prefill, *pair.decode)}
    assert ids == {answer.headers["x-request-id"]}
    assert re.fullmatch("[0-9a-f]{32}", ids.pop())


@pytest.mark.parametrize("given", ["a" * 128, "chatcmpl-0_1.2:3/4=5@6~7+8"])
def test_a_plain_request_id_stays(pair, given):
    answer = pair.client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": given})
    assert answer.headers["x-request-id"] == given == pair.decode[0].headers[0]["x-request-id"]


def test_a_nested_body_is_relayed_or_refused_at_any_depth(pair):
    limit = sys.getrecursionlimit()
    depths = [100, *range(limit - 120, limit + 5), 10 * limit]
    answers = []
    for depth in depths:
        raw = b'{"prompt": "x", "a": ' + b"[" * depth + b"]" * depth + b"}"
        answers.append(pair.client.post("/v1/completions", content=raw))
    assert {answer.status_code for answer in answers} == {200, 400}
    assert answers[0].status_code == 200
    errors = [answer.json()["error"]["code"] for answer in answers if answer.status_code == 400]
    assert set(errors) == {"invalid_json"}


@pytest.mark.parametrize("status", [503, 429])
def test_the_kv_is_for_the_next_decode_engine_where_one_was_busy(stage, fake, kv, status):
    scene = stage([fake(hands_over=kv)], [fake(status=status), fake(status=status), fake()])
    assert scene.complete().status_code == 200
    assert [engine.bodies[0]["kv_transfer_params"] for engine in scene.decode] == [kv] * 3
    assert len(scene.prefill[0].raw) == 1


def test_the_kv_is_not_for_a_third_engine_where_one_was_busy_and_one_failed(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake(status=503), fake(status=500), fake()])
    assert scene.complete().status_code == 200
    given = ["kv_transfer_params" in engine.bodies[0] for engine in scene.decode]
    assert given == [True, True, False], "the one that failed may have fetched it"


def test_headers_beyond_64_kib_end_the_connection():
    over = threading.Event()
    app = router_app(RouterSettings(prefill=("http://127.0.0.1:1",), decode=("http://127.0.0.1:1",)))
    with listen("127.0.0.1", 0) as sock:
        address = url_of(sock).removeprefix("http://").split(":")
        server = threading.Thread(target=run_app, args=(app, sock, lambda: not over.is_set()), daemon=True)
        server.start()
        try:
            assert b"HTTP/1.1 503" in told(address, b"a" * 1000)
            assert b"HTTP/1.1 503" not in told(address, b"a" * (1 << 20))
        finally:
            over.set()
            server.join()


def told(address: list[str], header: bytes) -> bytes:
    """What the server at this address says to a request with such a header."""
    with socket.create_connection((address[0], int(address[1])), timeout=30) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-a: " + header + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            return client.recv(100)
    return b""


def test_a_second_signal_ends_a_drain_even_if_its_exception_is_lost():
    app = router_app(RouterSettings(prefill=(), decode=("http://127.0.0.1:1",)))
    app._ongoing.add(ActiveRequest())
    with listen("127.0.0.1", 0) as sock, pytest.raises(KeyboardInterrupt):
        run_app(app, sock, lambda: False, 3600, is_urgent=lambda: True)
