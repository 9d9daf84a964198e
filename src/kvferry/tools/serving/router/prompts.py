"""The prompt of a request, without tokenising it: its approximate length, and what an engine has of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from kvferry.tools.serving.router.backends import Backend
from kvferry.tools.serving.router.bodies import CHAT, COMPLETIONS, api_of, encoded
from kvferry.tools.serving.router.replies import MESSAGES, RESPONSES

# About what tokenizers need for English text. It decides where to compute, never what.
_BYTES_PER_TOKEN = 4
_MAX_SESSIONS = 10_000
_BESIDE_MESSAGES = ("system", "instructions", "tools", "documents")
# Fields that change the tokens of a prompt or the blocks that it may share.
_CONTEXT = ("model", "cache_salt", "chat_template", "chat_template_kwargs", *_BESIDE_MESSAGES)
TOKENIZE = "/tokenize"
# Fields that vLLM's ``/tokenize`` takes of a completion, beside its prompt, and of a chat.
_PLAIN = ("model", "add_special_tokens")
_TOKENIZED = (
    *_PLAIN,
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
_TEXT_PARTS = (
    "text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking", "tool_use",
    "tool_result", "function_call", "function_call_output", "reasoning",
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


def prompt_tokens(body: Mapping[str, Any]) -> list[int] | None:
    """Return the token ids of a prompt that is given as such; None for any other.

    >>> prompt_tokens({"prompt": [[1, 2, 3]]}), prompt_tokens({"prompt": "What is a lease word?"})
    ([1, 2, 3], None)
    """
    prompt = _prompt(body)
    if not isinstance(prompt, list) or not prompt:
        return None
    return prompt if all(type(one) is int and 0 <= one < 1 << 32 for one in prompt) else None


def tokenize_request(path: str, body: Mapping[str, Any]) -> tuple[str, bytes] | None:
    """Return the path and body with which an engine tokenises a prompt; None if neither would be exact."""
    api, prompt = api_of(path, body), _prompt(body)
    if api in (MESSAGES, RESPONSES):
        # vLLM converts these to its own chats, in ways that change from release to release.
        return f"{api}/render", encoded(body)
    if api == CHAT:
        asked = {key: body[key] for key in _TOKENIZED if body.get(key) is not None}
    elif api == COMPLETIONS and isinstance(prompt, str):
        asked = {"prompt": prompt, **{key: body[key] for key in _PLAIN if body.get(key) is not None}}
    else:
        return None
    return TOKENIZE, encoded(asked)


def has_media(body: dict[str, Any]) -> bool:
    """Return whether the messages have parts other than text, whose number of tokens is unknown."""
    pending = [body.get("messages"), body.get("input")]
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
    """The prompt of a request by its digest, to recognise prompts that begin with it."""

    digest: bytes  # XXH3 of the fields beside the prompt, and of the prompt's bytes
    size: int
    tokens: int  # approximate number

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


def _prompt(body: Mapping[str, Any]) -> Any:
    prompt = next((body[field] for field in ("prompt", "messages", "input") if field in body), None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        return prompt[0]
    return prompt


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
