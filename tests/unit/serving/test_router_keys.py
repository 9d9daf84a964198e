"""API keys, origins of web pages, and further endpoints."""

import logging

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.serving.router.settings import read_keys

pytestmark = pytest.mark.slow

KEYS = ("first-key", "second-key")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(scene, **headers: str):
    return scene.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)


@pytest.mark.parametrize("engine_key", [None, "engine-key"])
def test_only_requests_with_a_key_reach_engines_which_get_their_own(stage, fake, kv, engine_key, caplog):
    caplog.set_level(logging.DEBUG)
    scene = stage([fake(hands_over=kv)], [fake()], api_keys=KEYS, engine_key=engine_key)
    for wrong in ({}, bearer("wrong"), {"Authorization": "first-key"}):
        answer = ask(scene, **wrong)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (401, "invalid_api_key")
    assert scene.decode[0].raw == []
    for key in KEYS:
        assert ask(scene, **bearer(key)).status_code == 200
    for engine in (scene.prefill[0], scene.decode[0]):
        expected = None if engine_key is None else f"Bearer {engine_key}"
        assert {headers.get("authorization") for headers in engine.headers} == {expected}
    assert scene.client.get("/v1/models").status_code == 401
    assert scene.client.get("/health").status_code == scene.client.post("/ping").status_code == 200
    assert not [key for key in (*KEYS, "engine-key") if key in caplog.text]


def test_pages_of_allowed_origins_may_use_the_router_and_others_not(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake()], api_keys=KEYS, allowed_origins=("https://a.example",))
    for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        preflight = scene.client.options("/v1/completions", headers=asked)
        answer = ask(scene, Origin=origin, **bearer(KEYS[0]))
        for one in (preflight, answer):
            assert one.headers.get("access-control-allow-origin") == allowed


def test_keys_are_read_from_a_file_or_else_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("a\nb\n")
    assert read_keys(file, "KVFERRY_TEST_KEY") == ("a", "b")
    assert read_keys(None, "KVFERRY_TEST_KEY") == ()
    monkeypatch.setenv("KVFERRY_TEST_KEY", "c")
    assert read_keys(None, "KVFERRY_TEST_KEY") == ("c",)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="has no key"):
        read_keys(file, "KVFERRY_TEST_KEY")


def test_messages_are_prefilled_elsewhere_and_responses_and_embeddings_are_not(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake()])
    body = {"messages": [], "max_tokens": 5, "stop_sequences": ["a"], "kv_transfer_params": {"forged": 1}}
    assert scene.client.post("/v1/messages", json=body).status_code == 200
    assert scene.prefill[0].bodies[0]["max_tokens"] == 1
    assert scene.decode[0].bodies[0]["kv_transfer_params"] == kv
    for path in ("/v1/responses", "/v1/embeddings"):
        assert scene.client.post(path, json={"input": "x", "kv_transfer_params": kv}).status_code == 200
        sent = scene.decode[0].bodies[-1]
        sent.pop("request_id", None)
        assert sent == {"input": "x"}
    assert len(scene.prefill[0].raw) == 1


@pytest.mark.parametrize("last", ["message_stop", "response.completed"])
def test_streams_of_other_endpoints_end_with_an_event_of_their_own(stage, fake, kv, last):
    chunks = [b"event: x\ndata: {}\n\n", f"event: {last}\ndata: {{}}\n\n".encode()]
    scene = stage([fake(hands_over=kv)], [fake(chunks=chunks)])
    assert scene.client.post("/v1/messages", json={"stream": True}).content == b"".join(chunks)
