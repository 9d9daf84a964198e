"""A server with vLLM's streams of tokens: the next token depends on every token before it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.tools.serving.router.backends import score, session_of

END = 0
# Characters of several tokens, each of one byte.
_PARTS = {90: b"\xf0", 91: b"\x9f", 92: b"\x99", 93: b"\x82", 94: b"\xc3", 95: b"\xa9"}
_NEXT_PART = {90: 91, 91: 92, 92: 93, 94: 95}


def next_token(known: list[int]) -> int:
    """A tenth of all tokens begins a character of several tokens."""
    if (forced := _NEXT_PART.get(known[-1])) is not None:
        return forced
    drawn = int.from_bytes(hashlib.sha256(json.dumps(known).encode()).digest()[:2], "little")
    return (90, 94)[drawn % 2] if drawn % 10 == 0 else 1 + drawn % 89


def text_of(tokens: list[int]) -> str:
    return b"".join(_PARTS.get(one, b" w%d" % one) for one in tokens).decode(errors="replace")


def tokens_of(text: str) -> list[int]:
    """The tokens of a prompt."""
    return [1 + ord(letter) % 89 for letter in text]


@dataclass
class TokenEngine:
    """An engine whose streams end as its attributes say.

    Attributes:
        dies_after: number of tokens after which a stream ends badly; None for good streams.
        dies: how: the connection breaks, or the last event says ``abort`` or ``error``, as vLLM's.
        loses: number of the last events of a complete stream that are lost.
        per_event: number of tokens in an event.
        swallows: whether a parser takes the third token of a chat.
        reasons: whether a parser calls the fourth token of a chat reasoning.
        keeps_prompt: whether it ignores the token ids in place of a chat's messages, as older releases do.
        bodies: parsed bodies of completions.
        created: time in its events.
    """

    dies_after: int | None = None
    dies: str = "break"
    loses: int = 0
    per_event: int = 1
    swallows: bool = False
    reasons: bool = False
    keeps_prompt: bool = False
    created: int = 1
    bodies: list[dict[str, Any]] = field(default_factory=list)
    asked_for_text: int = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/health", lambda _: Response()),
            ]
        )

    async def detokenize(self, request: Request) -> Response:
        self.asked_for_text += 1
        return JSONResponse({"prompt": text_of((await request.json())["tokens"])})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        chat = request.url.path.endswith("chat/completions")
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        known = tokens_of(prompt) if isinstance(prompt, str) else prompt
        if not self.keeps_prompt:
            known = (body.get("kv_transfer_params") or {}).get("prompt_token_ids", known)
        name = request.headers["x-request-id"]
        events = self.chat_events(body, known, name) if chat else self.events(body, known, name)
        return StreamingResponse(self.ended(events), media_type="text/event-stream")

    async def ended(self, events: list[dict[str, Any]]) -> AsyncIterator[bytes]:
        """Send events, and end the stream as the attributes say."""
        lines = [b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode() for event in events]
        lines.append(b"data: [DONE]\n\n")
        count = 0
        for line, event in zip(lines[: len(lines) - self.loses], [*events, {}], strict=False):
            choices = event.get("choices") or [{}]
            count += len(choices[0].pop("count", ()))
            if self.dies_after is not None and count > self.dies_after:
                if self.dies == "abort":
                    choices[0] |= {"finish_reason": "abort", "text": "", "delta": {"content": ""}}
                    yield b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode()
                elif self.dies == "error":
                    yield b'data: {"error": {"message": "EngineCore encountered an issue", "code": 500}}\n\n'
                if self.dies != "break":
                    yield lines[-1]
                    return
                raise ConnectionResetError  # uvicorn cuts the connection
            yield line.replace(b'"count":[],', b"")
        if self.loses:
            raise ConnectionResetError

    def generated(self, body: dict[str, Any], known: list[int]) -> list[tuple[list[int], str, str | None]]:
        """Tokens, text and finish reason of each event."""
        limit = body.get("max_tokens") or 16
        # As a tokenizer's stream: text begins after the last whole character, or anew.
        text, seen, found = text_of(known), list(known), []
        sent = 0 if text.endswith("\ufffd") else len(text)
        tokens: list[int] = []
        for _ in range(limit):
            tokens.append(next_token([*seen, *tokens]))
        for at in range(0, limit, self.per_event):
            new = tokens[at : at + self.per_event]
            start = sent
            for token in new:
                seen.append(token)
                if not (text := text_of(seen)).endswith("\ufffd"):
                    sent = len(text)
            last = at + self.per_event >= limit
            found.append((new, text[start:sent], "length" if last else None))
        return found

    def usages(self, body: dict[str, Any], known: list[int], answered: int) -> dict[str, Any]:
        if not (body.get("stream_options") or {}).get("include_usage"):
            return {}
        counts = {"prompt_tokens": len(known), "total_tokens": len(known) + answered}
        details = {"prompt_tokens_details": {"cached_tokens": len(known) - 1}}
        return {"usage": {**counts, "completion_tokens": answered, **details}}

    def events(self, body: dict[str, Any], known: list[int], name: str) -> list[dict[str, Any]]:
        head = {"id": f"cmpl-{name}", "object": "text_completion", "created": self.created, "model": "m"}
        ids, found = body.get("return_token_ids"), []
        for tokens, text, reason in self.generated(body, known):
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
            choice |= {"stop_reason": None, "prompt_token_ids": known if ids and not found else None}
            choice |= {"token_ids": tokens if ids else None, "count": tokens}
            found.append({**head, "choices": [choice]})
        usage = self.usages(body, known, body.get("max_tokens") or 16)
        return [*found, *([{**head, "choices": [], **usage}] if usage else [])]

    def chat_events(self, body: dict[str, Any], known: list[int], name: str) -> list[dict[str, Any]]:
        head = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": self.created}
        head["model"] = "m"
        ids = body.get("return_token_ids")
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        first = {**head, "choices": [{**choice, "finish_reason": None}]}
        found = [{**first, "prompt_token_ids": known if ids else None}]
        for number, (tokens, text, reason) in enumerate(self.generated(body, known)):
            delta: dict[str, Any] = {"content": text}
            if self.swallows and number == 2:
                delta = {}
                if not ids:
                    continue
            elif self.reasons and number == 3:
                delta = {"reasoning": text}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            choice |= {"token_ids": tokens if ids else None, "count": tokens}
            found.append({**head, "choices": [choice]})
        usage = self.usages(body, known, body.get("max_tokens") or 16)
        return [*found, *([{**head, "choices": [], **usage}] if usage else [])]


def session_for(url: str, others: list[str]) -> str:
    """The name of a session whose requests go to this engine."""
    for number in range(1000):
        name = f"session {number}"
        session = session_of(((b"x-session-id", name.encode()),), {})
        assert session is not None
        if all(score(session, url) > score(session, other) for other in others):
            return name
    raise AssertionError("no session prefers this engine")
