"""Take a prompt's KV from a vLLM server, or give a prompt's KV to it.

The server runs the same checkpoint with kvferry's connector. This client only forwards the offer with its
ticket, a random id that claims the KV. K and V go directly from engine to engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx

from examples.transformers_engine.engine import Answer, Engine

COMPUTE_FOR_ANOTHER = {"do_remote_decode": True}
"""``kv_transfer_params`` of a request whose KV another engine will read."""


def take(client: httpx.Client, engine: Engine, prompt: list[int], max_tokens: int) -> Answer:
    """Let a vLLM server compute a prompt, read the prompt's KV from the server, and generate the answer here.

    Args:
        client: HTTP client with the server's address as its base URL.
        engine: engine that generates the answer.
        prompt: token ids of the prompt.
        max_tokens: number of tokens of the answer.

    Raises:
        httpx.HTTPError: the server does not answer, or refuses the request.
    """
    offer = _complete(client, prompt, 1, COMPUTE_FOR_ANOTHER)["kv_transfer_params"]
    return engine.generate(prompt, max_tokens, offer)


def give(client: httpx.Client, engine: Engine, prompt: list[int], max_tokens: int) -> list[int]:
    """Compute a prompt here, let a vLLM server read its KV, and return the answer that the server generates.

    Args:
        client: HTTP client with the server's address as its base URL.
        engine: engine that computes the prompt.
        prompt: token ids of the prompt.
        max_tokens: number of tokens of the answer.

    Returns:
        Token ids of the answer.

    Raises:
        httpx.HTTPError: the server does not answer, or refuses the request.
    """
    offer = engine.generate(prompt, 1, COMPUTE_FOR_ANOTHER).kv_transfer_params
    found: list[int] = _complete(client, prompt, max_tokens, offer)["choices"][0]["token_ids"]
    return found


def compare(
    client: httpx.Client,
    engine: Engine,
    prompt: list[int],
    max_tokens: int,
    say: Callable[[str], None] = print,
) -> bool:
    """Answer a prompt in three ways, and return True if all three answers are equal.

    The first answer is computed by this engine alone. For the second, a vLLM server computes the prompt
    (`take`). For the third, the server continues the prompt (`give`).

    Args:
        client: HTTP client with the server's address as its base URL.
        engine: engine in this process.
        prompt: token ids of the prompt.
        max_tokens: number of tokens of each answer.
        say: function that prints a line of text.
    """
    alone = engine.generate(prompt, max_tokens)
    taken = take(client, engine, prompt, max_tokens)
    answers = {
        "computed here": alone.token_ids,
        f"continued here, {taken.loaded.get('peer', 0)} tokens from vLLM": taken.token_ids,
        "computed here, continued by vLLM": give(client, engine, prompt, max_tokens),
    }
    for what, tokens in answers.items():
        say(f"{what}: {' '.join(map(str, tokens))}")
    return all(tokens == alone.token_ids for tokens in answers.values())


def _complete(
    client: httpx.Client, prompt: list[int], max_tokens: int, params: Mapping[str, Any]
) -> dict[str, Any]:
    """Send a greedy completion request to the server, and return the decoded JSON of its response.

    Args:
        client: HTTP client with the server's address as its base URL.
        prompt: token ids of the prompt.
        max_tokens: number of tokens to generate.
        params: ``kv_transfer_params`` of the request.

    Raises:
        httpx.HTTPError: the server does not answer, or refuses the request.
    """
    body = {
        "model": client.get("/v1/models").raise_for_status().json()["data"][0]["id"],
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": dict(params),
    }
    found: dict[str, Any] = client.post("/v1/completions", json=body).raise_for_status().json()
    return found
