"""The prompt of a request, without tokenising it: its approximate length, and what an engine has of it."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import xxhash
from starlette.types import Send

from kvferry.tools.serving.router.backends import Backend, Pool
from kvferry.tools.serving.router.bodies import encoded
from kvferry.tools.serving.router.endpoint import Call
from kvferry.tools.serving.router.events import is_events, relay_events
from kvferry.tools.serving.router.failures import is_failure
from kvferry.tools.serving.router.fleet import probe
from kvferry.tools.serving.router.replies import RESPONSES, RETRY_LATER, ApiError, Headers, Reply
from kvferry.tools.serving.router.upstream import (
    BROKEN,
    BrokenBeforeFirst,
    EngineClient,
    describe_error,
    note_unreachable,
    read_whole,
)

# About what tokenizers need for English text. It decides where to compute, never what.
_BYTES_PER_TOKEN = 4
_MAX_SESSIONS = 10_000
_BESIDE_MESSAGES = ("system", "tools", "documents")
# Fields that change the tokens of a prompt or the blocks that it may share.
_CONTEXT = ("model", "cache_salt", "chat_template", "chat_template_kwargs", *_BESIDE_MESSAGES)
_TEXT_PARTS = (
    "text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking", "tool_use", "tool_result"
)  # fmt: skip


def estimated_tokens(body: dict[str, Any]) -> int:
    """Return the approximate number of prompt tokens of a request, without images and other media.

    The number is exact for a prompt of token ids.

    >>> estimated_tokens({"prompt": [[1, 2, 3]]})
    3
    >>> estimated_tokens({"messages": [{"role": "user", "content": "What is a lease word?"}]})
    7

    Raises:
        MalformedBody: the body's objects are nested too deeply.
    """
    prompt = _prompt(body)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    size = sum(len(_encoded(text)) for text in _texts(prompt))
    size += sum(len(encoded(body[field])) for field in _BESIDE_MESSAGES if body.get(field))
    return -(-size // _BYTES_PER_TOKEN)


def has_media(body: dict[str, Any]) -> bool:
    """Return whether the messages have parts other than text, whose number of tokens is unknown."""
    pending = [body.get("messages")]
    while pending:
        one = pending.pop()
        if isinstance(one, list):
            pending += one
        elif isinstance(one, dict):
            if "role" not in one and one.get("type") not in _TEXT_PARTS:
                return True
            pending.append(one.get("content"))
    return False


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """The prompt of a request by its digest, to recognise prompts that begin with it.

    Attributes:
        digest: XXH3 of the fields beside the prompt, and of the prompt's bytes.
        size: number of the prompt's bytes.
        tokens: approximate number of the prompt's tokens.
    """

    digest: bytes
    size: int
    tokens: int

    @classmethod
    def of(cls, path: str, body: dict[str, Any]) -> PromptPrefix:
        content = _content(body)
        return cls(_digest(path, body, content), len(content), estimated_tokens(body))

    def new_tokens(self, path: str, body: dict[str, Any]) -> int | None:
        """Return about how many tokens a prompt has after this prefix; None if it does not begin with it."""
        content = _content(body)
        if len(content) < self.size or _digest(path, body, content[: self.size]) != self.digest:
            return None
        return estimated_tokens(body) - self.tokens


class Turns:
    """The last prompt of each session, as a digest. The least recently used session is dropped."""

    def __init__(self, max_sessions: int = _MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        # By session: the decode engine that got the prompt, how often it had been down by then, the prompt.
        self._turns: OrderedDict[int, tuple[Backend, int, PromptPrefix]] = OrderedDict()

    def remember(self, session: int, backend: Backend, path: str, body: dict[str, Any]) -> None:
        """Record that a decode engine has the prompt of a request."""
        self._turns[session] = backend, backend.losses, PromptPrefix.of(path, body)
        self._turns.move_to_end(session)
        if len(self._turns) > self._max_sessions:
            self._turns.popitem(last=False)

    def new_tokens(self, session: int, backend: Backend, path: str, body: dict[str, Any]) -> int | None:
        """Return about how many tokens a request adds to the session's last prompt.

        Return None if the engine has not got that prompt, was down since then, or if the prompt of the
        request does not begin with it.
        """
        last, losses, prompt = self._turns.get(session, (None, 0, None))
        if prompt is None or last is not backend or losses != backend.losses:
            return None
        return prompt.new_tokens(path, body)


def _prompt(body: dict[str, Any]) -> Any:
    prompt = body.get("prompt", body.get("messages"))
    return prompt[0] if isinstance(prompt, list) and len(prompt) == 1 and _is_prompt(prompt[0]) else prompt


def _is_prompt(item: Any) -> bool:
    return isinstance(item, (str, list))


def _content(body: dict[str, Any]) -> bytes:
    """Return the bytes of the prompt: if a prompt's items begin with another's, so do the bytes."""
    prompt = _prompt(body)
    if isinstance(prompt, list):
        return encoded(prompt).removeprefix(b"[").removesuffix(b"]") + b", "
    return _encoded(prompt) if isinstance(prompt, str) else encoded(prompt)


def _digest(path: str, body: dict[str, Any], content: bytes) -> bytes:
    beside = encoded([path, "messages" in body, *(body.get(field) for field in _CONTEXT)])
    digest = xxhash.xxh3_128(beside)
    digest.update(content)
    return digest.digest()


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON may have half of a surrogate pair


def _texts(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            pending += one
        elif isinstance(one, dict):
            # An image is not text, however long its URL is.
            pending += [item for key, item in one.items() if key not in ("image_url", "input_audio")]


_PREVIOUS = "previous_response_id"
_ID = "request_id"


def with_response_id(path: str, body: dict[str, Any], backend: Backend) -> dict[str, Any]:
    """Return the body of a request to a decode engine, with an id for the response if it makes one."""
    # An id that the client has chosen is kept.
    if path != RESPONSES or body.get(_ID) is not None:
        return body
    return {**body, _ID: f"resp_{secrets.token_hex(16)}{_mark(backend)}"}


def previous_response(path: str, body: dict[str, Any]) -> str | None:
    """Return the id of the response that a request continues; None if it continues none."""
    found = body.get(_PREVIOUS) if path == RESPONSES else None
    return found if isinstance(found, str) else None


def not_found(response_id: str, unreachable: Sequence[Backend] = ()) -> Reply:
    """Return the error for a response that no engine has: 404, or 503 if an engine does not answer."""
    message = f"Response with id '{response_id}' not found"
    if unreachable:
        urls = ", ".join(backend.url for backend in unreachable)
        message += f": no decode engine that answers has it, and {urls} cannot be reached"
        return ApiError(503, message, "engine_unavailable", (RETRY_LATER,)).reply(RESPONSES)
    message += (
        " on any decode engine; engines started with VLLM_ENABLE_RESPONSES_API_STORE=1 keep responses "
        "until they end"
    )
    return ApiError(404, message, "response_not_found").reply(RESPONSES)


class Responses:
    """The responses that decode engines keep, also those that are being removed."""

    def __init__(self, decode: Pool, client: EngineClient) -> None:
        self._decode, self._client = decode, client

    async def keeper_of(self, response_id: str, headers: Headers) -> Backend | Reply:
        """Return the decode engine that keeps a response, or the error for the client.

        The engine is known if the id names it, or if there is one engine only. It need not have the response.
        """
        backends = (*self._decode.backends, *self._decode.draining)
        named = [one for one in backends if response_id.endswith(_mark(one))] or backends
        if len(named) == 1:
            return named[0]
        unreachable = []
        for backend in backends:
            try:
                async with self._client.opened("GET", backend, path_of(response_id), headers) as answer:
                    if answer.status == 200:
                        return backend
                    if answer.status == 404:
                        continue
                    if not is_failure(answer.status):
                        return await read_whole(answer)  # the engine wants another key
            except BROKEN as error:
                note_unreachable(backend, error)
            unreachable.append(backend)
        return not_found(response_id, unreachable)

    async def relay(self, call: Call, send: Send) -> None:
        """Send a request about a response to the engine that keeps it, and relay the answer to the client."""
        response_id, *action = call.path.removeprefix(f"{RESPONSES}/").split("/")
        keeper = await self.keeper_of(response_id, call.headers)
        if isinstance(keeper, Reply):
            await keeper.send(send, call.reply_headers)
            return
        target = call.target("/".join([path_of(response_id), *action]))
        try:
            async with self._client.opened(call.method, keeper, target, call.headers, call.body) as answer:
                if is_events(answer):
                    fault = await relay_events(answer, send, call.reply_headers, RESPONSES)
                    call.record.broken = fault is not None
                    return
                reply = await read_whole(answer)
        except (*BROKEN, BrokenBeforeFirst) as error:
            # vLLM also breaks the stream of a response that it has not made in the background.
            await probe(self._client, keeper)
            if keeper.up:
                message = f"decode engine {keeper.url} failed while answering: {describe_error(error)}"
                reply = ApiError(500, message, "engine_failed").reply(RESPONSES)
            else:
                reply = not_found(response_id, [keeper])
        await reply.send(send, call.reply_headers)


def path_of(response_id: str) -> str:
    """Return the path of a response on an engine."""
    return f"{RESPONSES}/{quote(response_id, safe='')}"


def _mark(backend: Backend) -> str:
    """Return the end of the ids of an engine's responses, 8 hex digits."""
    return f"{xxhash.xxh3_64_intdigest(backend.url.encode()) >> 32:08x}"
