"""A router that is its own engine, or that asks a router that asks it."""

import httpx
import pytest

from kvferry.tools.serving.devices import listen, url_of
from kvferry.tools.serving.router.app import RouterApp
from kvferry.tools.serving.router.settings import RouterSettings
from kvferry.tools.serving.router.upstream import Hop


@pytest.fixture
def pair(stage, fake, kv):
    return stage([fake(hands_over=kv)], [fake()])


def test_via_names_this_router_and_those_before_it(pair):
    pair.client.post("/v1/completions", json={"prompt": "x"}, headers={"Via": "1.1 front"})
    for engine in (*pair.prefill, *pair.decode):
        first, own = engine.headers[0]["via"].split(", ")
        assert first == "1.1 front"
        assert own.startswith("1.1 kvferry-")


def test_returning_request_is_recognised_by_via_only():
    hop = Hop()
    [(_, own)] = hop.passed_on()
    assert hop.has_seen([(b"via", b"1.1 front, " + own)])
    assert not hop.has_seen([(b"via", b"1.1 front"), (b"x-a", own)])
    assert not Hop().has_seen([(b"via", own)]), "another router may be before this one"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_request_that_comes_back_is_refused_and_asks_no_engine(pair, path):
    pair.complete()
    via = {"Via": f"{pair.decode[0].headers[0]['via']}, 1.1 other", "X-Request-Id": "abc"}
    asked = len(pair.prefill[0].raw), len(pair.decode[0].raw)
    answer = pair.client.post(path, json={"prompt": "x"}, headers=via)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (508, "router_loop")
    assert answer.headers["x-request-id"] == "abc"
    assert pair.client.get("/health", headers=via).status_code == 508
    assert (len(pair.prefill[0].raw), len(pair.decode[0].raw)) == asked


def test_router_that_is_its_own_decode_engine_reports_it(serve_app, stage, fake, kv):
    with listen("127.0.0.1", 0) as sock:
        own = url_of(sock)
    prefill = stage([fake(hands_over=kv)], [fake()]).prefill[0]
    settings = RouterSettings(prefill=(prefill.url,), decode=(own,), probe_seconds=600.0)
    with (
        serve_app(RouterApp(settings), int(own.rpartition(":")[2])),
        httpx.Client(base_url=own, timeout=60, trust_env=False) as client,
    ):
        answer = client.post("/v1/completions", json={"prompt": "x"})
        health = client.get("/health").json()
    assert answer.status_code == 503
    assert health["decode"][0]["reason"] == "it is this router itself, or a router that asks it"
