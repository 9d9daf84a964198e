"""What the prefill engine is sent for a request, and what the decode engine is."""

from __future__ import annotations

import json
from typing import Any

from kvferry.errors import KVFerryError

# What only the answer depends on. Whatever may change the prompt's tokens stays: messages, tools,
# tool_choice, chat_template*, documents, truncate_prompt_tokens, response_format, all that is not named here.
_ANSWER_ONLY = (
    "best_of",
    "echo",
    "logprobs",
    "min_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "top_logprobs",
)

ASK_FOR_KV = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""``kv_transfer_params`` of a request whose KV another engine will ask for."""


class MalformedBody(KVFerryError):
    """A request that cannot be read; the message is for the caller."""


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        MalformedBody: it is no JSON, or no object.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedBody(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise MalformedBody(f"the request body is a JSON {type(body).__name__}, it must be an object")
    return body


def prefill_body(body: dict[str, Any]) -> bytes:
    """The body for a prefill engine: the same prompt, one token, its KV kept for another engine.

    ``ignore_eos`` because an engine hands over nothing for a request that its first token ended.
    """
    kept = {key: value for key, value in body.items() if key not in _ANSWER_ONLY}
    kept |= {"max_tokens": 1, "stream": False, "ignore_eos": True, "kv_transfer_params": ASK_FOR_KV}
    if "max_completion_tokens" in body:
        kept["max_completion_tokens"] = 1
    return json.dumps(kept).encode()


def decode_body(body: dict[str, Any], params: dict[str, Any]) -> bytes:
    """The caller's body with what the prefill engine handed over."""
    return json.dumps({**body, "kv_transfer_params": params}).encode()


def handed_over(answer: bytes) -> dict[str, Any] | None:
    """``kv_transfer_params`` of a prefill engine's answer; None if there is nothing to use."""
    try:
        params = json.loads(answer).get("kv_transfer_params")
    except (ValueError, AttributeError, RecursionError):
        return None
    return params if isinstance(params, dict) and params else None


def wants_stream(body: dict[str, Any]) -> bool:
    """Whether the answer comes as events."""
    return bool(body.get("stream"))


def decodes_alone(body: dict[str, Any]) -> bool:
    """Whether another engine's KV is of no use, or of no sound use, for this request.

    - The caller brings KV of its own choice.
    - Several prompts: an answer has room for the KV of one, and the decode engine would use it for all.
    - Logprobs of the prompt: the engine computes the whole prompt for them.
    - Beam search and embedded prompts: the requests inside the engine carry no parameters, or no tokens.
    - Nothing is to be generated.
    """
    prompt = body.get("prompt")
    return bool(
        body.get("kv_transfer_params")
        or (isinstance(prompt, list) and len(prompt) != 1 and not _is_tokens(prompt))
        or body.get("prompt_logprobs") is not None
        or (body.get("echo") and body.get("logprobs") not in (None, False))
        or body.get("use_beam_search")
        or body.get("prompt_embeds")
        or body.get("max_tokens") == 0
    )


def _is_tokens(prompt: list[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)
