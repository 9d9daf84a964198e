"""The router's own errors have the form of vLLM's, or of Anthropic's where vLLM has that."""

from __future__ import annotations

import json
from http import HTTPStatus

import pytest

from kvferry.tools.serving.router.replies import ApiError

responses = pytest.importorskip("vllm.entrypoints.serve.exception_handling.error_response")
vllm_protocol = pytest.importorskip("vllm.entrypoints.serve.engine.protocol")
anthropic = pytest.importorskip("vllm.entrypoints.anthropic.protocol")

OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/nonsense")
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("status", "raised"), [(400, ValueError("text")), (500, RuntimeError("text"))], ids=["client", "server"]
)
def test_error_has_the_form_of_vllms_and_a_reason_beside(path, status, raised):
    reply = ApiError(status, "text", "engine_failed").reply(path)
    expected = responses.create_error_response(raised).model_dump()
    assert reply.status == expected["error"]["code"]
    assert json.loads(reply.body) == {"error": {**expected["error"], "reason": "engine_failed"}}


@pytest.mark.parametrize("status", [400, 401, 404, 405, 413, 500, 503, 508])
def test_error_of_every_status_is_one_that_vllms_clients_read(status):
    error = ApiError(status, "text", "reason")
    for path in OPENAI:
        read = vllm_protocol.ErrorResponse.model_validate_json(error.reply(path).body).error
        assert (read.code, read.message, read.param) == (status, "text", None)
        assert read.type in HTTPStatus(status).phrase or read.type.endswith("Error")
    for path in ANTHROPIC:
        read = anthropic.AnthropicErrorResponse.model_validate_json(error.reply(path).body)
        assert (read.type, read.error.message) == ("error", "text")


@pytest.mark.parametrize("path", [*OPENAI[:2], ANTHROPIC[0]])
def test_last_event_of_a_broken_stream_has_the_content_of_the_answer(path):
    error = ApiError(503, "text", "router_stopped")
    event = error.event(path)
    assert event.endswith(b"\n\n")
    name, _, data = event.rstrip().rpartition(b"data: ")
    assert data == error.reply(path).body
    assert name == (b"event: error\n" if path in ANTHROPIC else b"")


def test_mistakes_of_a_client_are_told_in_the_form_of_the_endpoint(stage, fake):
    scene = stage([], [fake()])
    for path in (*OPENAI[:2], ANTHROPIC[0]):
        answer = scene.client.post(path, content=b"{")
        assert answer.status_code == 400
        kind = "invalid_request_error" if path in ANTHROPIC else "BadRequestError"
        assert (answer.json()["error"]["type"], answer.json()["error"]["reason"]) == (kind, "invalid_json")
        wrong = scene.client.delete(path)
        kind = "invalid_request_error" if path in ANTHROPIC else "Method Not Allowed"
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, kind)
