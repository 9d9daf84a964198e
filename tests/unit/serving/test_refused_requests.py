"""Requests that vLLM refuses cost no prefill: the prefill engine refuses them, too, or is not asked."""

from __future__ import annotations

import json
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

chat = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
completion = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
anthropic = pytest.importorskip("vllm.entrypoints.anthropic.protocol")
messages = pytest.importorskip("vllm.entrypoints.anthropic.serving")

from vllm.entrypoints.serve.utils.api_utils import get_max_tokens  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402

from kvferry.tools.serving.router.bodies import (  # noqa: E402
    CHAT,
    COMPLETIONS,
    KV_PARAMS,
    decodes_alone,
    prefill_body,
)
from kvferry.tools.serving.router.replies import MESSAGES  # noqa: E402
from support.odd_requests import VALUES  # noqa: E402

TURN = {"messages": [{"role": "user", "content": "x"}]}
BASE = {
    COMPLETIONS: {"model": "m", "prompt": "x"},
    CHAT: {"model": "m", **TURN},
    MESSAGES: {"model": "m", "max_tokens": 9, **TURN},
}
REQUESTS = {
    COMPLETIONS: completion.CompletionRequest,
    CHAT: chat.ChatCompletionRequest,
    MESSAGES: anthropic.AnthropicMessagesRequest,
}
MODEL = SimpleNamespace(
    max_model_len=2**31,
    max_logprobs=20,
    is_diffusion=False,
    get_vocab_size=lambda: 100,
    logits_processors=None,
)
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def refusal(path: str, body: dict[str, Any]) -> str | None:
    """vLLM's reason to refuse a request before it is scheduled; None if it accepts it."""
    try:
        request = REQUESTS[path].model_validate(json.loads(json.dumps(body)))
        if path == MESSAGES:
            request = messages.AnthropicServingMessages.to_chat_completion_request(request)
        request.build_tok_params(MODEL)
        most = request.max_tokens
        if path != COMPLETIONS and request.max_completion_tokens is not None:
            most = request.max_completion_tokens
        sampling = request.to_sampling_params(get_max_tokens(MODEL.max_model_len, most, 5, {}), {})
        sampling.verify(MODEL, None, None, None)
    except (ValueError, TypeError, AttributeError, OverflowError, VLLMValidationError) as error:
        return str(error)
    return None


def costs_a_prefill(path: str, body: dict[str, Any]) -> bool:
    return decodes_alone(path, body) is None and refusal(path, json.loads(prefill_body(body))) is None


REFUSED = {
    COMPLETIONS: [
        {"n": 0},
        {"n": -1},
        {"n": None},
        {"n": 100_000},
        {"n": 2, "temperature": 0},
        {"logprobs": 99},
        {"logprobs": -2},
        {"logprob_token_ids": [1]},
        {"max_tokens": -3},
        {"min_tokens": 17},
        {"min_tokens": 6, "max_tokens": 5},
        {"min_tokens": 6, "max_tokens": 5, "max_completion_tokens": 9},
        {"min_tokens": None},
        {"stop": ["a", ""]},
        {"stop_token_ids": [100]},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": "sometimes"}},
        {"stream": True, "stream_options": [1]},
        {"stream": True, "stream_options": True},
        {"stream": "perhaps"},
        {"stream_interval": 0},
    ],
    CHAT: [
        {"n": 0},
        {"n": 2, "temperature": 0.0},
        {"logprobs": True, "top_logprobs": 99},
        {"top_logprobs": 2},
        {"max_tokens": -3},
        {"max_tokens": 5, "max_completion_tokens": -3},
        {"min_tokens": 6, "max_tokens": 5},
        {"min_tokens": 6, "max_completion_tokens": 5},
        {"stream_options": {"include_usage": True}},
        {"tool_choice": "required"},
        {"tools": []},
    ],
    MESSAGES: [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"max_tokens": None, "max_completion_tokens": 5},
        {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 2000}},
        {"stop_sequences": [""]},
        {"stream": "perhaps"},
    ],
}
ACCEPTED = {
    COMPLETIONS: [
        {},
        {"n": 2},
        {"n": 2, "temperature": 0.5},
        {"max_tokens": None, "min_tokens": 16},
        {"min_tokens": 5, "max_tokens": 5},
        {"logprobs": 20},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": None}},
        {"stream": None, "stream_options": None, "stop": None},
    ],
    CHAT: [
        {},
        {"n": None, "max_tokens": None, "max_completion_tokens": None},
        {"min_tokens": 100},
        {"max_tokens": 5, "max_completion_tokens": 9, "min_tokens": 5},
        {"logprobs": True, "top_logprobs": 20, "stream": True},
        {"tools": [TOOL], "tool_choice": "required", "n": 3},
    ],
    MESSAGES: [
        {},
        {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"stream": True, "stop_sequences": ["a"]},
    ],
}


def cases(table: dict[str, list[dict[str, Any]]]) -> list[Any]:
    listed = chain.from_iterable(((path, fields) for fields in rows) for path, rows in table.items())
    return [pytest.param(path, fields, id=f"{path.split('/')[2]}-{fields}") for path, fields in listed]


@pytest.mark.parametrize(("path", "fields"), cases(REFUSED))
def test_a_request_that_vllm_refuses_costs_no_prefill(path, fields):
    body = {**BASE[path], **fields}
    assert refusal(path, body)
    assert not costs_a_prefill(path, body)


@pytest.mark.parametrize(("path", "fields"), cases(ACCEPTED))
def test_a_request_that_vllm_accepts_is_prefilled(path, fields):
    body = {**BASE[path], **fields}
    assert refusal(path, body) is None
    assert costs_a_prefill(path, body)


@pytest.mark.parametrize("path", REQUESTS)
def test_no_value_of_any_field_costs_a_prefill_if_vllm_refuses_it(path):
    """Also of fields that a later vLLM has."""
    seen = set()
    for name in REQUESTS[path].model_fields.keys() - {KV_PARAMS}:  # the router replaces them for both engines
        for value in VALUES.values():
            body = {**BASE[path], name: value}
            if refusal(path, body):
                seen.add(name)
                assert not costs_a_prefill(path, body), (name, value)
            elif decodes_alone(path, body) is None:
                assert costs_a_prefill(path, body), (name, value)
    assert len(seen) > 15


def test_a_request_without_a_field_that_vllm_requires_costs_no_prefill():
    for path, body in BASE.items():
        for name in body:
            fewer = {key: value for key, value in body.items() if key != name}
            assert not (refusal(path, fewer) and costs_a_prefill(path, fewer)), (path, name)
