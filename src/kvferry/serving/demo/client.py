"""Stream completions from an OpenAI endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from kvferry.errors import KVFerryError


class CompletionError(KVFerryError):
    """Raised if an endpoint cannot be reached, refuses a request or ends its answer early."""


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """A complete answer to a streamed completion request at temperature 0.

    Attributes:
        prompt: token ids of the prompt.
        tokens: token ids of the answer.
        logprobs: one mapping per token of the answer, from the ids of the likeliest tokens to their log
            probabilities; empty if the request does not ask for log probabilities.
        first_token_seconds: time from sending the request to the first token, in seconds.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    first_token_seconds: float


def ask(
    client: httpx.Client,
    url: str,
    body: Mapping[str, Any],
    *,
    request_id: str,
    on_text: Callable[[str], None] = lambda _: None,
) -> StreamedAnswer:
    """Send a completion request, stream the answer, and return it when it is complete.

    Args:
        client: HTTP client.
        url: base URL of the OpenAI endpoint.
        body: JSON fields of the request, with the prompt and ``max_tokens``. Fields are added so that the
            answer is streamed, is decoded greedily and has exactly ``max_tokens`` tokens. With ``ignore_eos``
            false it may be shorter.
        request_id: value of the ``X-Request-Id`` header.
        on_text: function that is called with each piece of text as it arrives.

    Raises:
        CompletionError: the endpoint answers with a status other than 200 or an error event, or the stream
            breaks or has no token.
    """
    whole = {"ignore_eos": True, **body, "temperature": 0.0, "stream": True}
    whole |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    prompt: list[int] = []
    tokens: list[int] = []
    logprobs: list[Mapping[int, float]] = []
    started = time.monotonic()
    first = 0.0
    for choice in _choices(client, f"{url}/v1/completions", whole, request_id):
        first = first or time.monotonic() - started
        prompt += choice.get("prompt_token_ids") or ()
        tokens += choice.get("token_ids") or ()
        logprobs += _likeliest(choice)
        on_text(choice.get("text") or "")
    if not tokens:
        raise CompletionError(f"{url} ended its answer to {request_id} without a token")
    return StreamedAnswer(tuple(prompt), tuple(tokens), tuple(logprobs), first)


def _choices(
    client: httpx.Client, url: str, body: Mapping[str, Any], request_id: str
) -> Iterator[dict[str, Any]]:
    """Send a completion request, and yield each choice object of the streamed events as it arrives.

    Args:
        client: HTTP client.
        url: full URL of the completions endpoint.
        body: JSON body of the request.
        request_id: value of the ``X-Request-Id`` header.

    Raises:
        CompletionError: the endpoint cannot be reached, or answers with an error.
    """
    try:
        with client.stream("POST", url, json=body, headers={"X-Request-Id": request_id}) as response:
            if response.status_code != httpx.codes.OK:
                raise CompletionError(
                    f"{url} answered {response.status_code}: {_error_text(response.read())}"
                )
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: ") or data == "[DONE]":
                    continue
                event = msgspec.json.decode(data)
                if "error" in event:
                    raise CompletionError(f"{url} broke off: {_error_text(data.encode())}")
                yield from event.get("choices", ())
    except httpx.HTTPError as error:
        raise CompletionError(f"{url} cannot be reached: {error}") from error


def _likeliest(choice: Mapping[str, Any]) -> Iterator[Mapping[int, float]]:
    """Yield the log probabilities of the likeliest tokens at each position of a streamed choice.

    Args:
        choice: choice object of a streamed completion, with tokens written as their ids, such as
            ``token_id:7``.

    Yields:
        One mapping per position, from token id to log probability. Nothing is yielded if `choice` has no log
        probabilities.
    """
    for likeliest in (choice.get("logprobs") or {}).get("top_logprobs") or ():
        yield {int(name.removeprefix("token_id:")): value for name, value in likeliest.items()}


def _error_text(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:300].decode(errors="replace")
