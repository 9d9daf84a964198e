"""Mixed traffic of an OpenAI endpoint, drawn from a seed, and a single engine's answers to it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import httpx

TEXT = "the quick brown fox jumps over a lazy dog and then it does so once more because it can"
ANSWER_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        kind: for the report.
        path: below the endpoint.
        body: without the model's salt.
        leaves: the client reads so many events of the stream and goes; None if it stays.
    """

    kind: str
    path: str
    body: dict[str, Any]
    leaves: int | None = None


class NoAnswer(Exception):
    """A stream that says that it failed."""


def words(draw: random.Random, count: int) -> str:
    """So many words in random order."""
    return " ".join(draw.choices(TEXT.split(), k=count))


def completion(draw: random.Random, kind: str, model: str, count: int, **more: Any) -> Ask:
    """A completion of so many words."""
    body = {"model": model, "prompt": words(draw, count), "max_tokens": ANSWER_TOKENS, **more}
    return Ask(kind, "/v1/completions", _greedy(body))


def single_asks(draw: random.Random, model: str) -> list[Ask]:
    """Requests that stand alone, of every kind."""
    found = [completion(draw, "short", model, draw.randrange(1, 12)) for _ in range(6)]
    found += [completion(draw, "long", model, draw.randrange(100, 330)) for _ in range(10)]
    found += [completion(draw, "stream", model, draw.randrange(50, 300), stream=True) for _ in range(6)]
    found += [
        completion(draw, "samples", model, draw.randrange(50, 300), n=3, temperature=1.0, top_k=1)
        for _ in range(4)
    ]
    for _ in range(4):
        whole = completion(draw, "leaves", model, draw.randrange(50, 200), stream=True)
        found.append(Ask(whole.kind, whole.path, {**whole.body, "max_tokens": 300}, draw.randrange(1, 5)))
    return found


def chat(model: str, messages: list[dict[str, str]]) -> Ask:
    """One turn of a chat."""
    body = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS}
    return Ask("chat turn", "/v1/chat/completions", _greedy(body))


def _greedy(body: dict[str, Any]) -> dict[str, Any]:
    return {"temperature": 0, "ignore_eos": True, **body}


async def answer(client: httpx.AsyncClient, url: str, ask: Ask, salt: str) -> list[str]:
    """Texts of an answer's choices; a client that leaves has the beginning of one.

    Raises:
        httpx.HTTPError: it is refused, or does not come.
        NoAnswer: it fails after it has begun.
    """
    body = {**ask.body, "cache_salt": salt}
    if not body.get("stream"):
        reply = await client.post(url + ask.path, json=body)
        reply.raise_for_status()
        return [_text(choice) for choice in reply.json()["choices"]]
    async with client.stream("POST", url + ask.path, json=body) as reply:
        reply.raise_for_status()
        return await _streamed(reply, ask.leaves)


def is_right(ask: Ask, said: list[str], expected: list[str]) -> bool:
    """Return whether an answer is the expected one, or of a client that left, its beginning.

    >>> ask = Ask("leaves", "", {}, leaves=1)
    >>> is_right(ask, ["a"], ["abc"]), is_right(ask, ["b"], ["abc"]), is_right(ask, [], ["abc"])
    (True, False, False)
    """
    if ask.leaves is None:
        return said == expected
    return len(said) == 1 and expected[0].startswith(said[0])


async def _streamed(reply: httpx.Response, leaves: int | None) -> list[str]:
    text, seen = "", 0
    async for line in reply.aiter_lines():
        if leaves is not None and seen >= leaves:
            break
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "choices" not in event:
                raise NoAnswer(line)
            seen += 1
            text += "".join(map(_text, event["choices"]))
    return [text]


def _text(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


async def conversations(
    client: httpx.AsyncClient, url: str, draw: random.Random, model: str, count: int, turns: int
) -> list[list[tuple[Ask, list[str]]]]:
    """Chats of several turns, each with the answers of the engine at `url`."""
    found = []
    for number in range(count):
        messages: list[dict[str, str]] = []
        turn_by_turn = []
        for turn in range(turns):
            text = words(draw, draw.randrange(40, 90))
            messages = [*messages, {"role": "user", "content": text}]
            ask = chat(model, messages)
            said = await answer(client, url, ask, f"single {number} {turn}")
            turn_by_turn.append((ask, said))
            messages = [*messages, {"role": "assistant", "content": said[0]}]
        found.append(turn_by_turn)
    return found
