"""Derive the bodies and headers for the prefill and the decode engine from the client's request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.common.errors import KVFerryError, ProtocolError
from kvferry.connector import parse_hints
from kvferry.tools.serving.router.metrics import AloneReason
from kvferry.tools.serving.router.replies import MESSAGES, RESPONSES, Headers

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
DETOKENIZE = "/detokenize"
# SageMaker's endpoint, which takes the bodies of several others.
_INVOCATIONS = "/invocations"
# Requests that go to a decode engine alone. A response may continue one that the decode engine keeps, and may
# run tools, so that it takes several prompts. So do a batch of chats and a decision. The others generate no
# tokens, apart from Cohere's chats.
DECODE_ONLY = frozenset(
    (
        RESPONSES,
        _INVOCATIONS,
        "/classify",
        "/cohere/v2/chat",
        "/cohere/v2/chat/render",
        "/generative_scoring",
        "/pooling",
        "/rerank",
        "/score",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/embeddings",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/rerank",
        "/v1/responses/render",
        "/v1/score",
        "/v1/systemone",
        "/v2/embed",
        "/v2/rerank",
    )
)

_DATA_PARALLEL_RANK = b"x-data-parallel-rank"
# They name a client's request in logs and traces, so the router's own request must not have them.
_IDS = (b"x-request-id", b"traceparent", b"tracestate")

_LIMITS = ("max_completion_tokens", "max_tokens")
# Counts that the prefill engine gets with another value or not at all, and their valid values. vLLM accepts
# larger ones, too. Such a request goes to a decode engine alone, as one that is invalid.
_COUNTS = {
    "max_completion_tokens": range(1, 2**31),
    "max_tokens": range(1, 2**31),
    "min_tokens": range(2**31),
    "n": range(1, 129),
}

# Value of ``max_tokens`` if a completion has none. Other endpoints have no fixed one.
_DEFAULT_LIMIT = 16

# ``kv_transfer_params`` of a prefill request: keep the KV until another engine reads it.
ASK_FOR_KV = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


KV_PARAMS = "kv_transfer_params"
HINTS = "hints"
"""Key of `KV_PARAMS` that clients may set: the hints of `connector.hints`."""
# vLLM merges this field, and no other, into the dictionary that also holds ``kv_transfer_params``. So those
# must be removed from it too.
_EXTRA_ARGUMENTS = "vllm_xargs"


class MalformedBody(KVFerryError):
    """Raised if a request body cannot be parsed or encoded. The message is sent to the client."""


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse the body of a request. Raise MalformedBody if it is not a JSON object."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedBody(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise MalformedBody(f"the request body is a JSON {type(body).__name__}; it must be an object")
    return body


def api_of(path: str, body: Mapping[str, Any]) -> str:
    """Return the path of the endpoint that serves a request.

    >>> api_of("/invocations", {"prompt": "x"}), api_of("/invocations", {"input": "x"})
    ('/v1/completions', '/invocations')
    """
    if path != _INVOCATIONS:
        return path
    # vLLM, too, chooses the endpoint by the form of the body.
    return CHAT if "messages" in body else COMPLETIONS if "prompt" in body else path


def without_kv_params(body: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a request body without ``kv_transfer_params``, but for well-formed hints.

    >>> without_kv_params({"prompt": "x", "vllm_xargs": {"kv_transfer_params": "a", "b": 1}})
    {'prompt': 'x', 'vllm_xargs': {'b': 1}}
    >>> without_kv_params({"kv_transfer_params": {"hints": {"ends_session": True}, "remote_host": "a"}})
    {'kv_transfer_params': {'hints': {'ends_session': True}}}
    """
    # Only an engine or a trusted proxy may set this field: it says from where an engine reads KV.
    kept = {key: value for key, value in body.items() if key != KV_PARAMS}
    # Hints are about KV of the client's own tenant only.
    if (hints := _hints(body)) is not None and not fault_of_hints(body):
        kept[KV_PARAMS] = {HINTS: hints}
    extra = kept.get(_EXTRA_ARGUMENTS)
    if isinstance(extra, dict) and KV_PARAMS in extra:
        kept[_EXTRA_ARGUMENTS] = {key: value for key, value in extra.items() if key != KV_PARAMS}
    return kept


def fault_of_hints(body: dict[str, Any]) -> str:
    """Return why the hints in a request body are malformed; empty if they are not, or there are none."""
    hints = _hints(body)
    try:
        if hints is not None:
            parse_hints(hints)
    except ProtocolError as error:
        return str(error)
    return ""


def _hints(body: dict[str, Any]) -> Any:
    params = body.get(KV_PARAMS)
    return params.get(HINTS) if isinstance(params, dict) else None


def encoded(body: Any, *, sort_keys: bool = False) -> bytes:
    """Encode a body, or a part of it, as JSON. Raise MalformedBody if its objects are nested too deeply."""
    try:
        return json.dumps(body, sort_keys=sort_keys).encode()
    except RecursionError as error:
        raise MalformedBody("the request body is nested too deeply") from error


def prefill_body(
    body: dict[str, Any], ticket: str | None = None, name: str | None = None, unwanted: Sequence[str] = ()
) -> bytes:
    """Return the body of a request that makes a prefill engine compute the prompt and keep the KV.

    vLLM checks a request before it computes anything. So a request that the decode engine would refuse costs
    no prefill if the prefill engine checks the same fields. Therefore the body has all fields of the request,
    also those that matter only to the answer, except the few that one token and a whole answer require to
    change. `decodes_alone` checks the values of these.

    Args:
        body: parsed body of the client's request, for which `decodes_alone` is None.
        ticket: random id under which the decode engine asks for the KV while the prompt is computed, 32 hex
            digits; None if the prefill engine draws it and answers with it.
        name: random name of the KV, 32 hex digits, under which a later request may call it unwanted.
        unwanted: names of KV that no decode engine will read.
    """
    removed = ("min_tokens", "n", *(["stream_options"] if body.get("stream") else []))
    # A null is kept, because vLLM allows it for some fields only.
    kept = {key: value for key, value in body.items() if value is None or key not in removed}
    params: dict[str, Any] = {**(body.get(KV_PARAMS) or {}), **ASK_FOR_KV}
    if ticket is not None:
        params["remote_request_id"] = ticket
    if name is not None:
        params |= {"remote_name": name, "remote_unwanted": list(unwanted)}
    kept |= {"max_tokens": 1, "stream": False, KV_PARAMS: params}
    if "max_completion_tokens" in body:
        kept["max_completion_tokens"] = 1
    return encoded(kept)


def withdrawal_body(model: Any, unwanted: Sequence[str]) -> bytes:
    """Return the body of a request that computes one token, and says which KV is unwanted."""
    named = {} if model is None else {"model": model}
    return encoded({**named, "prompt": [0], "max_tokens": 1, KV_PARAMS: {"remote_unwanted": list(unwanted)}})


def withdrawal_headers(headers: Headers) -> Headers:
    """Return the headers of the router's own request to a prefill engine, without the ids of the client's."""
    return tuple((name, value) for name, value in prefill_headers(headers) if name not in _IDS)


def prefill_headers(headers: Headers) -> Headers:
    """Return the headers of the request to a prefill engine: all but X-Data-Parallel-Rank."""
    # The client chooses a rank of the decode engine, which a prefill engine may lack.
    return tuple((name, value) for name, value in headers if name != _DATA_PARALLEL_RANK)


def decode_body(body: dict[str, Any], params: dict[str, Any] | None) -> bytes:
    """Return the body of the request to a decode engine, with these ``kv_transfer_params`` if not None."""
    return encoded(body if params is None else {**body, KV_PARAMS: {**(body.get(KV_PARAMS) or {}), **params}})


def kv_params_of(answer: bytes) -> dict[str, Any] | None:
    """Return the ``kv_transfer_params`` in a prefill engine's answer; None if they are missing or empty."""
    try:
        params = json.loads(answer).get(KV_PARAMS)
    except (ValueError, AttributeError, RecursionError):
        return None
    return params if isinstance(params, dict) and params else None


def text_of(answer: bytes) -> str | None:
    """Return the text in the answer to ``/detokenize``; None if it has none."""
    try:
        text = json.loads(answer).get("prompt")
    except (ValueError, AttributeError, RecursionError):
        return None
    return text if isinstance(text, str) else None


def wants_stream(body: dict[str, Any]) -> bool:
    """Return whether a request asks for a streamed answer."""
    return bool(body.get("stream"))


def decodes_alone(path: str, body: dict[str, Any]) -> AloneReason | None:
    """Return why KV that a prefill engine computes would be of no use to a request; None if it is of use."""
    path, prompt = api_of(path, body), body.get("prompt")
    conditions = {
        AloneReason.ENDPOINT: path in DECODE_ONLY,
        AloneReason.KV_PARAMS: _names_kv(body.get(KV_PARAMS)),
        # A prefill engine answers with parameters for one prompt only, and the decode engine would use them
        # for all.
        AloneReason.PROMPTS: isinstance(prompt, list)
        and len(prompt) != 1
        and not (prompt and isinstance(prompt[0], int)),
        # The decode engine must compute the whole prompt. A chat asks with ``echo`` alone, a completion with
        # ``echo`` and ``logprobs``, even 0.
        AloneReason.PROMPT_LOGPROBS: body.get("prompt_logprobs") is not None
        or (body.get("echo") and (path == CHAT or body.get("logprobs") is not None)),
        # vLLM runs it as several internal requests, which do not get the parameters.
        AloneReason.BEAM_SEARCH: body.get("use_beam_search"),
        # Such a request has no token ids.
        AloneReason.PROMPT_EMBEDS: body.get("prompt_embeds"),
        AloneReason.NO_TOKENS: body.get("max_tokens") == 0 or body.get("max_completion_tokens") == 0,
        # A field that `prefill_body` changes has a value that vLLM refuses, or one that is not known here.
        AloneReason.INVALID: not _is_plain(path, body),
    }
    return next((reason for reason, applies in conditions.items() if applies), None)


def _names_kv(params: Any) -> bool:
    """Return whether ``kv_transfer_params`` say more than hints."""
    return bool(params) and not (isinstance(params, dict) and params.keys() <= {HINTS})


def _is_plain(path: str, body: dict[str, Any]) -> bool:
    """Return whether the values of all fields that `prefill_body` changes are known to be valid."""
    for name, valid in _COUNTS.items():
        count = body.get(name)
        if count is not None and (type(count) is not int or count not in valid):
            return False
    least, n, stream = body.get("min_tokens") or 0, body.get("n") or 1, body.get("stream")
    limits = [body[name] for name in _LIMITS if body.get(name) is not None]
    if least > min(limits, default=_DEFAULT_LIMIT if path == COMPLETIONS else least):
        return False
    temperature = body.get("temperature")
    is_sampled = temperature is None or (isinstance(temperature, (int, float)) and temperature > 0)
    if n > 1 and not is_sampled:
        return False
    if path == MESSAGES and not _has_valid_limit(body):
        return False
    return stream is None or stream is False or (stream is True and _are_flags(body.get("stream_options")))


def _has_valid_limit(body: dict[str, Any]) -> bool:
    """Return whether a request to ``/v1/messages`` has ``max_tokens``, and more than may be thought."""
    limit, thinking = body.get("max_tokens"), body.get("thinking")
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
    # vLLM compares the two only in the request to the decode engine.
    return limit is not None and not (isinstance(budget, int) and budget >= limit)


def _are_flags(options: Any) -> bool:
    if not isinstance(options, dict):
        return options is None
    return all(flag is None or isinstance(flag, bool) for flag in options.values())
