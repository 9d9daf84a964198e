"""Every field of vLLM's requests, and what the router makes of it for the prefill engine."""

import json

import pytest

chat = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
completion = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")

from vllm.exceptions import VLLMValidationError  # noqa: E402

from kvferry.tools.serving.router.bodies import (  # noqa: E402
    CHAT,
    COMPLETIONS,
    decode_body,
    decodes_alone,
    fault_of_hints,
    prefill_body,
    without_kv_params,
)

REQUESTS = {CHAT: chat.ChatCompletionRequest, COMPLETIONS: completion.CompletionRequest}
PROMPTS = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, COMPLETIONS: {"prompt": "x"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

# A value that a caller may send; beside it, after a comma, what vLLM asks for together with it.
SAME = {
    # They change the prompt's tokens, or what the tokens are computed under.
    "add_generation_prompt": False,
    "add_special_tokens": False,
    "cache_salt": "s",
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"a": 1},
    "continue_final_message": (True, {"add_generation_prompt": False}),
    "documents": [{"text": "d"}],
    "ec_transfer_params": {"a": 1},
    "media_io_kwargs": {"video": {"num_frames": 2}},
    "messages": PROMPTS[CHAT]["messages"],
    "mm_processor_kwargs": {"a": 1},
    "model": "m",
    "prompt": "y",
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a"]},
    "suffix": "s",
    "tool_choice": ("required", {"tools": [TOOL]}),
    "tools": [TOOL],
    "truncate_prompt_tokens": 5,
    "truncation_side": "left",
    "vllm_xargs": {"a": 1},
    # They decide when, or for whom.
    "priority": 3,
    "request_id": "r",
    "session_id": "s",
    "user": "u",
    # They only decide which token follows, and what the answer has of it; it is not used.
    "allowed_token_ids": [1],
    "bad_words": ["b"],
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "length_penalty": 0.5,
    "logit_bias": {"1": 1.0},
    "logprob_token_ids": ([1], {"logprobs": 1}),
    "logprobs": 1,
    "min_p": 0.1,
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 2},
    "repetition_penalty": 1.5,
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "routed_experts_prompt_start": 2,
    "seed": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": ["a"],
    "stop_token_ids": [1],
    "stream_interval": 2,
    "temperature": 0.5,
    "thinking_token_budget": 3,
    "top_k": 3,
    "top_logprobs": (2, {"logprobs": True}),
    "top_p": 0.5,
    "watermarking": False,
    # Of vLLM's render endpoints only.
    "mm_payload": "none",
    "return_mm_kwargs": False,
    "return_token_offsets": True,
}
DROPPED = {
    "min_tokens": (3, {"max_tokens": 3}),
    "n": 2,
    "stream_options": ({"include_usage": True}, {"stream": True}),
}
CHANGED = {
    "kv_transfer_params": (None, {"do_remote_decode": True}),
    "max_completion_tokens": (9, 1),
    "max_tokens": (9, 1),
    "stream": (True, False),
}
# The request goes to a decode engine as it is.
ALONE = {
    COMPLETIONS: [
        {"prompt_logprobs": 0},
        {"echo": True, "logprobs": 0},
        {"use_beam_search": True},
        {"prompt_embeds": "AAAA"},
        {"prompt": ["a", "b"]},
        {"max_tokens": 0},
        {"kv_transfer_params": {"do_remote_prefill": True}},
    ],
    CHAT: [
        {"prompt_logprobs": 0},
        {"echo": True},
        {"use_beam_search": True},
        {"max_tokens": 0},
        {"max_completion_tokens": 0},
        {"kv_transfer_params": {"do_remote_prefill": True}},
    ],
}
SINCE_0_32 = {"mm_payload", "return_mm_kwargs"}
SINCE_0_33 = {"return_weight_versions"}
"""Fields that vLLM has since 0.33. The prefill engine gets them as they are, and nobody reads its answer."""
ALONE_FIELDS = {"echo", "prompt_logprobs", "use_beam_search", "prompt_embeds"}


@pytest.mark.parametrize("path", REQUESTS)
def test_every_field_of_vllms_requests_is_classified(path):
    known = {*SAME, *DROPPED, *CHANGED, *ALONE_FIELDS, *SINCE_0_33}
    new = set(REQUESTS[path].model_fields) - known
    assert not new, f"decide what the prefill engine gets of {sorted(new)}, and note it in this module"


def test_every_classified_field_exists_in_vllm():
    fields = {name for request in REQUESTS.values() for name in request.model_fields}
    gone = {*SAME, *DROPPED, *CHANGED, *ALONE_FIELDS} - SINCE_0_32 - fields
    assert not gone, f"remove {sorted(gone)} from this module: vLLM's requests do not have them any more"
    classes = [SAME, DROPPED, CHANGED, ALONE_FIELDS]
    assert sum(map(len, classes)) == len(set().union(*classes)), "a field is in two classes"


def callers(path: str, name: str, value) -> dict:
    """A request of a caller with this field."""
    value, others = value if isinstance(value, tuple) else (value, {})
    body = {"model": "m", **PROMPTS[path], **others, name: value}
    if path == CHAT and "logprobs" in body:
        body["logprobs"] = True
    return body


def cases():
    return [
        pytest.param(path, name, value, kept, id=f"{path.split('/')[2]}-{name}")
        for path, request in REQUESTS.items()
        for kept, table in ((True, SAME), (False, DROPPED))
        for name, value in table.items()
        if name in request.model_fields
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("path", "name", "value", "kept"), cases())
def test_vllm_accepts_the_body_for_the_prefill_engine(path, name, value, kept):
    body = callers(path, name, value)
    request = REQUESTS[path]
    request.model_validate(dict(body)).to_sampling_params(5, {})
    assert decodes_alone(path, body) is None
    sent = json.loads(prefill_body(body))
    assert sent.get(name) == (body[name] if kept else None)
    params = request.model_validate(dict(sent)).to_sampling_params(1, {})
    assert (params.n, params.max_tokens, params.min_tokens, params.prompt_logprobs) == (1, 1, 0, None)
    assert params.extra_args["kv_transfer_params"]["do_remote_decode"]


@pytest.mark.parametrize(("name", "values"), CHANGED.items())
def test_changed_fields_reach_the_prefill_engine_with_their_new_value(name, values):
    before, after = values
    sent = json.loads(prefill_body({**PROMPTS[CHAT], name: before}))[name]
    assert sent == after if name != "kv_transfer_params" else sent.items() >= after.items()


@pytest.mark.parametrize(
    ("path", "body"), [(path, body) for path, bodies in ALONE.items() for body in bodies], ids=str
)
def test_request_that_cannot_use_kv_of_another_engine_decodes_alone(path, body):
    assert decodes_alone(path, {"model": "m", **PROMPTS[path], **body})


@pytest.mark.parametrize("body", [{"echo": True}, {"logprobs": 0}, {"max_tokens": None}, {"prompt": [1, 2]}])
def test_completion_with_other_fields_is_prefilled_elsewhere(body):
    assert decodes_alone(COMPLETIONS, {"model": "m", **PROMPTS[COMPLETIONS], **body}) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("path", "request_of"), REQUESTS.items())
def test_router_cleans_every_field_through_which_vllm_takes_kv_transfer_params(path, request_of):
    hidden = {"kv_transfer_params": "of a client"}
    reached = set()
    for name in (*request_of.model_fields, "extra_body", "extra_args", "sampling_params"):
        body = {"model": "m", **PROMPTS[path], name: hidden}
        try:
            params = request_of.model_validate(dict(body)).to_sampling_params(5, {})
        except (ValueError, TypeError, VLLMValidationError):
            continue  # vLLM refuses an object here
        if (params.extra_args or {}).get("kv_transfer_params"):
            reached.add(name)
            cleaned = request_of.model_validate(without_kv_params(body)).to_sampling_params(5, {})
            assert "kv_transfer_params" not in (cleaned.extra_args or {}), name
    assert reached == {"kv_transfer_params", "vllm_xargs"}


HINTS = {"spans": [{"end": 8, "retain_seconds": 60}]}


def test_hints_of_callers_pass_the_router_and_are_no_reason_to_decode_alone():
    given = {"model": "m", **PROMPTS[COMPLETIONS], "kv_transfer_params": {"hints": HINTS, "remote_host": "x"}}
    body = without_kv_params(given)
    assert body["kv_transfer_params"] == {"hints": HINTS}
    assert decodes_alone(COMPLETIONS, given)
    assert decodes_alone(COMPLETIONS, body) is None
    for sent in (prefill_body(body), decode_body(body, {"remote_host": "y"})):
        assert json.loads(sent)["kv_transfer_params"]["hints"] == HINTS


@pytest.mark.parametrize("hints", [3, {"spans": 1}, {"ttl": 1}, [[]]])
def test_the_router_drops_malformed_hints_and_can_say_why(hints):
    body = {"prompt": "x", "kv_transfer_params": {"hints": hints}}
    assert without_kv_params(body) == {"prompt": "x"}
    assert fault_of_hints(body).startswith("hints: ")
    assert not fault_of_hints({"prompt": "x", "kv_transfer_params": hints})
