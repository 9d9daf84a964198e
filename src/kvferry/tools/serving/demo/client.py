"""Stream completions from an OpenAI endpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from kvferry.common.errors import KVFerryError
from kvferry.tools.serving.devices import listen, url_of
from kvferry.tools.serving.router.app import RouterApp
from kvferry.tools.serving.router.settings import RouterSettings
from kvferry.tools.serving.run import run_app


class CompletionError(KVFerryError):
    """Raised if an endpoint cannot be reached, refuses a request or ends its answer early."""


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """A complete answer to a streamed completion request at temperature 0.

    Attributes:
        prompt, tokens: token ids of the prompt and of the answer.
        logprobs: log probabilities of the likeliest tokens by id, per token of the answer; empty if the
            request does not ask for them.
    """

    request_id: str
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
    """Send a completion request, and return the streamed answer when it is complete.

    Args:
        body: JSON fields of the request, with the prompt and ``max_tokens``. Fields are added so that the
            answer is streamed, is decoded greedily and has exactly ``max_tokens`` tokens. With ``ignore_eos``
            false it may be shorter.

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
    return StreamedAnswer(request_id, tuple(prompt), tuple(tokens), tuple(logprobs), first)


def _choices(
    client: httpx.Client, url: str, body: Mapping[str, Any], request_id: str
) -> Iterator[dict[str, Any]]:
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
                    # The status was sent before the answer failed.
                    raise CompletionError(f"{url} broke off: {_error_text(data.encode())}")
                yield from event.get("choices", ())
    except httpx.HTTPError as error:
        raise CompletionError(f"{url} cannot be reached: {error}") from error


def _likeliest(choice: Mapping[str, Any]) -> Iterator[Mapping[int, float]]:
    """Yield the log probabilities of the likeliest tokens by id, at each position of a streamed choice."""
    for likeliest in (choice.get("logprobs") or {}).get("top_logprobs") or ():
        # The request asks vLLM to write tokens as their ids, because a text may stand for several.
        yield {int(name.removeprefix("token_id:")): value for name, value in likeliest.items()}


def _error_text(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:300].decode(errors="replace")


@contextmanager
def routed(prefill: Sequence[str], decode: Sequence[str]) -> Iterator[str]:
    """Run the router in a thread while the block runs, and yield its URL. Raise ConfigError for a bad URL."""
    app = RouterApp(RouterSettings(prefill=tuple(prefill), decode=tuple(decode)))
    sock = listen("127.0.0.1", 0)
    url = url_of(sock)
    ended = threading.Event()

    def serve() -> None:
        try:
            run_app(app, sock, lambda: not ended.is_set())
        except BaseException:
            # An error after `ended` is set comes from stopping the router, so it is not reported.
            if not ended.is_set():
                raise

    thread = threading.Thread(target=serve, name="router")
    thread.start()
    try:
        yield url
    finally:
        ended.set()
        thread.join()
