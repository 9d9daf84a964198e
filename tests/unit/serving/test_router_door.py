"""Callers as adversaries: what of their requests gets past the router's door."""

import contextlib
import json
import re
import socket
import sys

import httpx
import pytest

from kvferry.tools.serving.demo.client import routed
from kvferry.tools.serving.router.app import RouterApp
from kvferry.tools.serving.router.settings import RouterSettings
from kvferry.tools.serving.run import server_config
from support.waiting import wait_for

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
def test_kv_transfer_params_of_callers_do_not_reach_a_decode_engine_that_works_alone(pair, hidden):
    assert pair.complete(prompt_logprobs=1, **hidden).status_code == 200
    assert b"kv_transfer_params" not in pair.decode[0].raw[0]


def test_kv_transfer_params_in_a_duplicate_field_reach_no_engine(pair):
    twice = b'{"prompt": ["a", "b"], "vllm_xargs": {"kv_transfer_params": "forged"}, "vllm_xargs": {}}'
    assert pair.client.post("/v1/completions", content=twice).status_code == 200
    assert b"kv_transfer_params" not in pair.decode[0].raw[0]


def test_other_vllm_xargs_reach_the_decode_engine(pair):
    pair.complete(**HIDDEN["xargs"])
    assert pair.decode[0].bodies[0]["vllm_xargs"] == {"a": 1}


def test_body_of_a_trusted_front_reaches_the_decode_engine_unchanged(trusting):
    sent = json.dumps({"prompt": "x", "kv_transfer_params": FORGED}, indent=3).encode()
    assert trusting.client.post("/v1/completions", content=sent).status_code == 200
    assert trusting.prefill[0].raw == []
    assert trusting.decode[0].raw == [sent]


@pytest.mark.parametrize("given", ["a" * 129, "a b", "a\\nb", "<b>", 'a"b', "%0a", "\xe9", ""])
def test_request_id_that_is_long_or_odd_is_replaced(pair, given):
    headers = {b"X-Request-Id": given.encode("latin-1")}
    answer = pair.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    ids = {engine.headers[0]["x-request-id"] for engine in (*pair.prefill, *pair.decode)}
    assert ids == {answer.headers["x-request-id"]}
    assert re.fullmatch("[0-9a-f]{32}", ids.pop())


@pytest.mark.parametrize("given", ["a" * 128, "chatcmpl-0_1.2:3/4=5@6~7+8"])
def test_plain_request_id_is_kept(pair, given):
    answer = pair.client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": given})
    assert answer.headers["x-request-id"] == given == pair.decode[0].headers[0]["x-request-id"]


def test_nested_body_of_any_depth_is_relayed_or_refused(pair):
    limit = sys.getrecursionlimit()
    depths = [100, *range(limit - 120, limit + 5, 3), 10 * limit]
    answers = []
    for depth in depths:
        raw = b'{"prompt": "x", "a": ' + b"[" * depth + b"]" * depth + b"}"
        answers.append(pair.client.post("/v1/completions", content=raw))
    assert {answer.status_code for answer in answers} == {200, 400}
    assert answers[0].status_code == 200
    errors = [answer.json()["error"]["reason"] for answer in answers if answer.status_code == 400]
    assert set(errors) == {"invalid_json"}


@pytest.mark.parametrize("status", [503, 429])
def test_next_decode_engine_gets_the_kv_if_one_was_busy(stage, fake, kv, status):
    scene = stage([fake(hands_over=kv)], [fake(status=status), fake(status=status), fake()])
    assert scene.complete().status_code == 200
    assert [engine.bodies[0]["kv_transfer_params"] for engine in scene.decode] == [kv] * 3
    assert len(scene.prefill[0].raw) == 1


def test_third_decode_engine_computes_the_prompt_if_one_was_busy_and_one_failed(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake(status=503), fake(status=500), fake()])
    assert scene.complete().status_code == 200
    given = ["kv_transfer_params" in engine.bodies[0] for engine in scene.decode]
    assert given == [True, True, False], "the one that failed may have fetched it"


@pytest.fixture
def door(fake, kv, serve_app):
    """A router as users run it, with its engine for decoding, and a connection to it."""
    engine = fake()
    with (
        serve_app(fake(hands_over=kv).app()) as prefill,
        serve_app(engine.app()) as decode,
        routed([prefill], [decode]) as url,
        httpx.Client(base_url=url) as client,
        socket.create_connection((client.base_url.host, client.base_url.port), timeout=30) as sock,
    ):
        yield engine, sock, client


BODY = b'{"prompt": "x"}'
LARGE = b'{"prompt": "' + b"x" * 1_000_000 + b'"}'
UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n"


def post(body: bytes, headers: bytes = b"", length: bool = True) -> tuple[bytes, bytes]:
    """The head of a request, and its body: in chunks, if it is not to have a length."""
    framing = b"content-length: %d\r\n" % len(body) if length else b"transfer-encoding: chunked\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + framing + headers + b"\r\n"
    return head, body if length else b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def send_in_two(sock: socket.socket, client: httpx.Client, head: bytes, body: bytes) -> None:
    """Send the body once the router has read the head."""
    sock.sendall(head)
    wait_for(lambda: "active_requests 1.0" in client.get("/metrics").text)
    sock.sendall(body)


def answers(sock: socket.socket, count: int) -> list[int]:
    """The status of each of so many answers, and of any that came with them; fewer if the connection ends."""
    heard = b""
    with contextlib.suppress(ConnectionError):
        while len(found := re.findall(rb"HTTP/1.1 (\d+) ", heard)) < count or not heard.endswith(b"}"):
            if not (piece := sock.recv(1 << 16)):
                break
            heard += piece
    return [int(status) for status in found]


@pytest.mark.parametrize("length", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("body", [BODY, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("parts", [1, 2], ids=["at_once", "later"])
def test_request_to_change_the_protocol_is_served_with_its_body(door, parts, body, length):
    engine, sock, client = door
    for headers in (UPGRADE, b"", UPGRADE):
        head, rest = post(body, headers, length)
        if parts == 1:
            sock.sendall(head + rest)
        else:
            send_in_two(sock, client, head, rest)
        assert answers(sock, 1) == [200]
    assert [served["prompt"] for served in engine.bodies] == [json.loads(body)["prompt"]] * 3


def test_body_of_a_request_to_change_the_protocol_is_no_request(door):
    engine, sock, client = door
    head, body = post(b"%s%s" % post(BODY), UPGRADE)
    send_in_two(sock, client, head, body)
    assert answers(sock, 1) == [400]
    sock.sendall(b"".join(post(BODY, b"connection: close\r\n")))
    assert answers(sock, 2) == [200]
    assert len(engine.raw) == 1


def test_many_pipelined_requests_to_change_the_protocol_are_all_answered(door):
    _, sock, _ = door
    sock.sendall((b"GET /ping HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"\r\n") * 2000)
    assert answers(sock, 2000) == [200] * 2000


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_last_request_of_a_connection_may_ask_to_change_the_protocol(door, version):
    _, sock, _ = door
    head, body = post(BODY, b"connection: close, Upgrade\r\nupgrade: h2c\r\n")
    sock.sendall(head.replace(b"1.1", version) + body)
    assert answers(sock, 2) == [200]


def test_trailers_do_not_become_headers(door):
    engine, sock, _ = door
    head, body = post(BODY, length=False)
    sock.sendall(head + body[:-2] + b"authorization: Bearer forged\r\nx-session-id: forged\r\n\r\n")
    assert answers(sock, 1) == [200]
    assert "forged" not in str(engine.headers)


@pytest.mark.parametrize(
    ("part", "end"),
    [(b"x-a: %s\r\n" % (b"a" * 1000), b"\r\n"), (b"a" * 1000, b": a\r\n\r\n")],
    ids=["many", "long"],
)
def test_trailers_beyond_64_kib_end_the_connection(door, part, end):
    engine, sock, _ = door
    head, body = post(BODY, length=False)
    sock.sendall(head + body[:-2])
    with contextlib.suppress(ConnectionError):
        for _ in range(2000):
            sock.sendall(part)
        sock.sendall(end)
    assert answers(sock, 2) in ([400], [])
    assert engine.raw == []


def test_headers_beyond_64_kib_end_the_connection(door):
    _, sock, _ = door
    for length, expected in ((1000, [[200]]), (1 << 20, [[400], []])):
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * length + b"\r\n\r\n")
        assert answers(sock, 1) in expected


def test_connections_stay_open_for_longer_than_load_balancers_keep_them():
    app = RouterApp(RouterSettings(prefill=(), decode=("http://127.0.0.1:1",)))
    assert server_config(app).timeout_keep_alive > 60
