"""Routers of other projects: start one in front of a pair of engines, ask it, count what moved."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from support.ended import end
from support.waiting import wait_for

CLIENTS = 4
"""Requests that are under way at a time."""

STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Engines:
    """A prefill and a decode engine, and the transfer log of the decode engine."""

    model: str
    prefill: str
    decode: str
    log: Path

    def transfers(self) -> list[dict[str, Any]]:
        """Return all loads of the decode engine that have ended."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@contextmanager
def front(command: Sequence[str], url: str, health: str, log: Path) -> Iterator[str]:
    """Run a front until the block ends. It is ready when `url` + `health` answers with 200."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(url + health, trust_env=False).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    try:
        wait_for(is_ready)
        yield url
    finally:
        end(process)


def bodies(model: str, name: str, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Return paths and bodies of chats and completions, streamed or not, without a common prefix."""
    made = []
    for number in range(count):
        text = f"{uuid.uuid5(uuid.NAMESPACE_URL, f'{name} {number}')} says: " + "all of it once more, " * (
            2 + 7 * number % 30
        )
        body = {"model": model, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body |= STREAM if number % 2 else {}
        if number % 4 < 2:
            made.append(("/v1/completions", {**body, "prompt": text}))
        else:
            made.append(("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}))
    return made


def answers(url: str, asked: Sequence[tuple[str, dict[str, Any]]], **headers: str) -> list[str]:
    """Return the texts of all answers of an endpoint, streamed or not."""
    with (
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        return [*pool.map(lambda each: answer(client, *each, **headers), asked)]


def answer(client: httpx.Client, path: str, body: dict[str, Any], **headers: str) -> str:
    """Return the text of one answer."""
    response = client.post(path, json=body, headers=headers)
    assert response.status_code == httpx.codes.OK, response.text
    if not body.get("stream"):
        return _text(response.json())
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", response.text
    events = [json.loads(line) for line in lines[:-1]]
    return "".join(map(_text, events))


def _text(event: dict[str, Any]) -> str:
    """Return the text in an answer or in one event of it."""
    texts = []
    for choice in event["choices"]:
        said = choice.get("message") or choice.get("delta") or choice
        texts.append(said.get("content") or said.get("text") or "")
    return "".join(texts)
