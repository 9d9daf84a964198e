"""Which engine is asked what."""

import logging
import socket

import pytest

from kvferry.tools.serving.devices import listen, url_of
from kvferry.tools.serving.router.upstream import relayed, watched_socket

pytestmark = pytest.mark.slow

KV_KEYS = {"do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids"}


@pytest.fixture
def pair(stage, fake, kv):
    return stage([fake(hands_over=kv)], [fake()])


def test_decode_engine_gets_the_callers_body_and_the_prefill_engines_kv_transfer_params(pair, kv):
    answer = pair.complete(stop=["a"], logprobs=2, min_tokens=3)
    assert answer.status_code == 200
    assert answer.json()["usage"] == {"prompt_tokens": 7}
    [seen] = pair.decode[0].bodies
    expected = {"model": "m", "prompt": "x", "max_tokens": 5, "stop": ["a"], "logprobs": 2, "min_tokens": 3}
    assert seen == {**expected, "kv_transfer_params": kv}


def test_prefill_engine_computes_the_prompt_and_one_token(pair):
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    pair.complete(
        "/v1/chat/completions",
        messages=messages,
        tools=tools,
        tool_choice="auto",
        max_completion_tokens=9,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=3,
        min_tokens=4,
        stop=["x"],
    )
    [seen] = pair.prefill[0].bodies
    assert seen.pop("kv_transfer_params").keys() >= KV_KEYS
    assert seen == {
        "model": "m",
        "prompt": "x",
        "messages": messages,
        "tools": tools,
        "tool_choice": "auto",
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "logprobs": True,
        "top_logprobs": 3,
        "stop": ["x"],
    }


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 0},
        {"use_beam_search": True, "n": 2},
        {"prompt_embeds": "AAAA"},
        {"max_completion_tokens": 0},
        {"max_tokens": 0, "echo": True},
        {"n": 0},
        {"max_tokens": -3},
    ],
    ids=lambda body: next(iter(body)),
)
def test_request_that_cannot_use_kv_of_another_engine_goes_to_decode_alone(pair, body):
    sent = {"model": "m", "prompt": "x", **body}
    assert pair.client.post("/v1/completions", json=sent).status_code == 200
    assert pair.prefill[0].raw == []
    assert pair.decode[0].bodies == [sent]


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2, 3], [[1, 2, 3]]], ids=str)
def test_single_prompt_in_any_form_is_prefilled(pair, prompt):
    pair.complete(prompt=prompt)
    assert [body["prompt"] for body in pair.prefill[0].bodies] == [prompt]


def test_events_are_relayed_byte_for_byte(stage, fake, kv):
    chunks = [b": hello\n\nda", b'ta: {"a": "\xc3', b'\xa4"}\n', b"\nda", b"ta: [DONE]\n\n", b": bye"]
    scene = stage([fake(hands_over=kv)], [fake(chunks=chunks)])
    with scene.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert b"".join(answer.iter_raw()) == b"".join(chunks)


def test_events_are_relayed_as_they_arrive(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake(event_seconds=60)])
    with scene.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        assert b"The" in next(answer.iter_raw())


def test_both_engines_get_the_callers_request_id_and_key(pair):
    headers = {"X-Request-Id": "abc", "Authorization": "Bearer k"}
    answer = pair.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    for engine in (pair.prefill[0], pair.decode[0]):
        assert engine.headers[0]["x-request-id"] == "abc"
        assert engine.headers[0]["authorization"] == "Bearer k"
    assert answer.headers["x-request-id"] == "abc"


def test_headers_of_the_clients_connection_do_not_reach_engines(pair):
    """Compressed events could not be told apart, nor could a compressed offer be read."""
    own = {"proxy-authorization": "Basic x", "te": "trailers", "keep-alive": "timeout=9", "upgrade": "h2c"}
    pair.client.post("/v1/completions", json={"prompt": "x"}, headers={"accept-encoding": "gzip", **own})
    for engine in (pair.prefill[0], pair.decode[0]):
        assert not own.keys() & engine.headers[0].keys()
        assert engine.headers[0]["accept-encoding"] == "identity"


def test_header_names_are_relayed_in_lower_case():
    """As ASGI asks for; engines write them as they like."""
    assert relayed([(b"Content-Length", b"1"), (b"X-A", b"B")]) == ((b"x-a", b"B"),)


HOP_BY_HOP = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
]
"""RFC 9110, section 7.6.1."""


@pytest.mark.parametrize("name", [*HOP_BY_HOP, "content-length", "date", "expect", "host", "server"])
def test_header_of_one_connection_is_not_relayed(name):
    assert relayed([(name.encode(), b"x")]) == ()


def test_headers_that_connection_names_and_those_of_cors_are_not_relayed():
    given = [
        (b"Connection", b"X-Hop, close"),
        (b"x-hop", b"1"),
        (b"Access-Control-Allow-Origin", b"*"),
        (b"a", b"b"),
    ]
    assert relayed([*given, (b"Origin", b"https://a.example")]) == ((b"a", b"b"),)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has this option")
def test_kernel_gives_up_a_machine_that_acknowledges_nothing():
    with watched_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as sock:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize(("keep_seconds", "connections"), [(3600.0, 1), (0.0, 3)])
def test_connection_is_used_again_unless_it_was_idle_for_too_long(stage, fake, kv, keep_seconds, connections):
    scene = stage([fake(hands_over=kv)], [fake()], probe_seconds=3600, keep_connection_seconds=keep_seconds)
    for _ in range(3):
        scene.complete()
    for engine in (scene.prefill[0], scene.decode[0]):
        assert len(set(engine.ports)) == connections


def test_proxy_of_the_environment_is_ignored(stage, fake, kv, nobody, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, nobody)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    scene = stage([fake(hands_over=kv)], [fake()])
    assert scene.complete().status_code == 200
    assert len(scene.prefill[0].raw) == 1


def test_redirect_of_an_engine_is_relayed_and_not_followed(stage, fake, kv):
    elsewhere = fake()
    scene = stage([fake(hands_over=kv), elsewhere], [one := fake()])
    one.location = f"{elsewhere.url}/v1/models"
    answer = scene.client.get("/v1/models")
    assert (answer.status_code, answer.headers["location"]) == (307, one.location)


def test_data_parallel_rank_reaches_the_decode_engine_only(pair):
    pair.client.post("/v1/completions", json={"prompt": "x"}, headers={"X-data-parallel-rank": "3"})
    assert "x-data-parallel-rank" not in pair.prefill[0].headers[0]
    assert pair.decode[0].headers[0]["x-data-parallel-rank"] == "3"


def test_request_without_an_id_gets_one_for_both_engines(pair):
    answer = pair.complete()
    ids = {engine.headers[0]["x-request-id"] for engine in (pair.prefill[0], pair.decode[0])}
    assert ids == {answer.headers["x-request-id"]}


def test_requests_take_turns_among_engines_that_are_equally_busy(stage, fake, kv):
    scene = stage([fake(hands_over=kv) for _ in range(3)], [fake(), fake()])
    for _ in range(6):
        scene.complete()
    assert [len(engine.raw) for engine in scene.prefill] == [2, 2, 2]
    assert [len(engine.raw) for engine in scene.decode] == [3, 3]


def test_the_least_busy_engine_is_chosen(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake(event_seconds=60), fake()])
    with scene.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        events = answer.iter_raw()
        next(events)
        for _ in range(3):
            scene.complete()
    assert [len(engine.raw) for engine in scene.decode] == [1, 3]


def test_models_and_tokenize_are_forwarded_to_a_decode_engine(pair):
    assert pair.client.get("/v1/models").json() == {"data": [{"id": "m"}]}
    assert pair.client.post("/tokenize", json={"prompt": "x"}).json()["asked"] == {"prompt": "x"}


def test_unknown_path_and_wrong_method_are_errors_in_openais_form(pair):
    missing = pair.client.post("/v1/nonsense", json={})
    assert (missing.status_code, missing.json()["error"]["reason"]) == (404, "not_found")
    wrong = pair.client.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["reason"]) == (405, "method_not_allowed")
    assert missing.json()["error"].keys() == {"message", "type", "param", "code", "reason"}


@pytest.mark.parametrize("raw", [b"{", b"[1]", b"\xff", b"[" * 100_000], ids=["cut", "list", "utf8", "deep"])
def test_body_that_is_no_json_object_is_refused(pair, raw):
    answer = pair.client.post("/v1/completions", content=raw)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (400, "invalid_json")
    assert pair.prefill[0].raw == pair.decode[0].raw == []


def test_body_beyond_the_limit_is_refused(stage, fake):
    scene = stage([fake()], [fake()], max_body_bytes=1000)
    answer = scene.complete(prompt="x" * 1000)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (413, "request_too_large")
    sizes = {size: scene.client.post("/tokenize", content=b"1" * size).status_code for size in (1000, 1001)}
    assert sizes == {1000: 200, 1001: 413}


def test_health_lists_the_engines_that_are_up(stage, fake, nobody):
    scene = stage([fake(), nobody], [fake()])
    health = scene.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert [engine["up"] for engine in health.json()["prefill"]] == [True, False]
    assert "connect" in health.json()["prefill"][1]["reason"].lower()


def test_health_is_503_without_a_decode_engine(stage, fake, nobody):
    health = stage([fake()], [nobody]).client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "unavailable")


def test_health_names_an_engine_that_does_not_answer(stage):
    with listen("127.0.0.1", 0) as silent:
        health = stage([url_of(silent)], [url_of(silent)], silent_seconds=0.1).client.get("/health")
    assert health.status_code == 503
    assert health.json()["decode"][0]["reason"] == "it answers nothing, not even /health"


def test_health_is_degraded_without_a_prefill_engine(stage, fake, nobody):
    health = stage([nobody], [fake()]).client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")


def test_change_of_state_is_logged_once(stage, fake, nobody, caplog):
    caplog.set_level(logging.WARNING, "kvferry.router")
    scene = stage([fake()], [nobody])
    for _ in range(3):
        assert scene.complete().status_code == 503
    assert len([record for record in caplog.records if "is down" in record.message]) == 1
