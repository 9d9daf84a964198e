"""Bodies and headers for the prefill and the decode engine, made from the caller's request."""

from __future__ import annotations

import json
from typing import Any

from kvferry.errors import KVFerryError
from kvferry.serving.router.replies import Headers

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

_DATA_PARALLEL_RANK = b"x-data-parallel-rank"

_ANSWER_ONLY = (
    "best_of",
    "echo",
    "include_stop_str_in_output",
    "logprob_token_ids",
    "logprobs",
    "min_tokens",
    "n",
    "repetition_detection",
    "return_prompt_text",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "routed_experts_prompt_start",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_interval",
    "stream_options",
    "top_logprobs",
)
"""Fields that change only the answer. The prefill engine gets none of them; some are invalid without others.

All other fields stay, because they may change the prompt's tokens or whether the engine takes the request. A
test checks that every field of vLLM's requests is either here or known to stay.
"""

ASK_FOR_KV = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""``kv_transfer_params`` of a request whose KV another engine will ask for."""


KV_PARAMS = "kv_transfer_params"

_EXTRA_ARGUMENTS = "vllm_xargs"
"""vLLM merges this field, and no other, into the dictionary that ``kv_transfer_params`` goes to."""


class MalformedBody(KVFerryError):
    """A request body that cannot be parsed; the message is for the caller."""


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse the JSON object of a request.

    Raises:
        MalformedBody: it is not JSON, or not an object.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedBody(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise MalformedBody(f"the request body is a JSON {type(body).__name__}; it must be an object")
    return body


def without_kv_params(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body without ``kv_transfer_params``, which only an engine or a trusted front may send.

    >>> without_kv_params({"prompt": "x", "vllm_xargs": {"kv_transfer_params": "a", "b": 1}})
    {'prompt': 'x', 'vllm_xargs': {'b': 1}}
    """
    kept = {key: value for key, value in body.items() if key != KV_PARAMS}
    extra = kept.get(_EXTRA_ARGUMENTS)
    if isinstance(extra, dict) and KV_PARAMS in extra:
        kept[_EXTRA_ARGUMENTS] = {key: value for key, value in extra.items() if key != KV_PARAMS}
    return kept


def encoded(body: dict[str, Any]) -> bytes:
    """Return a body as JSON.

    Raises:
        MalformedBody: its objects are nested too deeply.
    """
    try:
        return json.dumps(body).encode()
    except RecursionError as error:
        raise MalformedBody("the request body is nested too deeply") from error


def prefill_body(body: dict[str, Any]) -> bytes:
    """Return the body for a prefill engine: the same prompt, one token, KV kept for another engine.

    Sets ``ignore_eos``, because vLLM's NixlConnector offers nothing if the first token ends the request.
    """
    kept = {key: value for key, value in body.items() if key not in _ANSWER_ONLY}
    kept |= {"max_tokens": 1, "stream": False, "ignore_eos": True, KV_PARAMS: ASK_FOR_KV}
    if "max_completion_tokens" in body:
        kept["max_completion_tokens"] = 1
    return encoded(kept)


def prefill_headers(headers: Headers) -> Headers:
    """Return the headers for a prefill engine, without the data-parallel rank, which is for decode."""
    return tuple((name, value) for name, value in headers if name != _DATA_PARALLEL_RANK)


def decode_body(body: dict[str, Any], params: dict[str, Any]) -> bytes:
    """Return the caller's body with the prefill engine's ``kv_transfer_params``."""
    return encoded({**body, KV_PARAMS: params})


def handed_over(answer: bytes) -> dict[str, Any] | None:
    """Return ``kv_transfer_params`` of a prefill engine's answer; None if it has none."""
    try:
        params = json.loads(answer).get(KV_PARAMS)
    except (ValueError, AttributeError, RecursionError):
        return None
    return params if isinstance(params, dict) and params else None


def wants_stream(body: dict[str, Any]) -> bool:
    """Return whether the caller wants a stream of events."""
    return bool(body.get("stream"))


def decodes_alone(path: str, body: dict[str, Any]) -> bool:
    """Return whether to skip prefill because the request cannot use another engine's KV.

    - The caller, a trusted front, brings its own ``kv_transfer_params``.
    - Several prompts: an answer has room for the KV of one, and the decode engine would use it for all.
    - Logprobs of the prompt: the engine computes the whole prompt for them. ``echo`` asks for them in a chat,
      and with ``logprobs`` (0 too) in a completion.
    - Beam search and embedded prompts: the requests inside the engine carry no parameters, or no tokens.
    - Nothing is to be generated.
    """
    prompt = body.get("prompt")
    return bool(
        body.get(KV_PARAMS)
        or (isinstance(prompt, list) and len(prompt) != 1 and not _is_tokens(prompt))
        or body.get("prompt_logprobs") is not None
        or (body.get("echo") and (path == CHAT or body.get("logprobs") is not None))
        or body.get("use_beam_search")
        or body.get("prompt_embeds")
        or body.get("max_tokens") == 0
        or body.get("max_completion_tokens") == 0
    )


def _is_tokens(prompt: list[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)
