"""Continue a stream at another decode engine, after the engine that sent it has failed.

    decode engine ── events, with token ids ──→ `Transcript` ── events ──→ client
         │ dead, silent, stopped
         └→ next decode engine ── the rest of the events ──→ `Continuation` ── events ──→ client

The router asks engines for the token ids of the prompt and of the answer, keeps them, and removes them from
the events. If the engine fails, another one gets these ids as its prompt and generates the rest, as in
Dynamo's request migration (https://docs.nvidia.com/dynamo/dev/kubernetes/fault-tolerance/request-migration).
A request is continued only if the rest depends on nothing but these tokens, see `may_continue`.

A token may be a part of a character. An engine would then repeat the whole prompt as text, because tokenizers
decode a prompt only from a whole character on. So the next engine generates such last tokens again: the
client has not seen any text of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from kvferry.tools.serving.router.bodies import CHAT, COMPLETIONS, KV_PARAMS, api_of
from kvferry.tools.serving.router.events import EngineGaveUp, RelayedStream
from kvferry.tools.serving.router.prompts import has_media

# Number of last tokens of which the text shows whether they end with a whole character.
_TAIL_TOKENS = 8
# A character has at most four bytes, and a token at least one.
_MAX_DROPPED = 3

# vLLM's value of ``max_tokens`` if a completion has none.
_DEFAULT_LIMIT = 16
_UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"

# Fields that apply to each token, or to prompt and answer alike, and fields that change nothing without those
# that `may_continue` refuses.
_UNCHANGED = frozenset(
    (
        "allowed_token_ids",
        "cache_salt",
        "ignore_eos",
        "include_reasoning",
        "include_stop_str_in_output",
        "length_penalty",
        "logit_bias",
        "metadata",
        "min_p",
        "model",
        "parallel_tool_calls",
        "priority",
        "prompt_cache_key",
        "reasoning_effort",
        "repetition_penalty",
        "request_id",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "safety_identifier",
        "service_tier",
        "session_id",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop_token_ids",
        "store",
        "stream",
        "stream_interval",
        "stream_options",
        "temperature",
        "tool_choice",
        "top_k",
        "top_logprobs",
        "top_p",
        "user",
    )
)
# Fields that decide the prompt's tokens, which are known.
_OF_THE_PROMPT = frozenset(
    (
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "messages",
        "mm_processor_kwargs",
        "prompt",
        "suffix",
        "truncate_prompt_tokens",
        "truncation_side",
    )
)
_KNOWN = _UNCHANGED | _OF_THE_PROMPT
_NOT_SENT_AGAIN = ("suffix", "truncate_prompt_tokens", "truncation_side")
_LIMITS = ("max_completion_tokens", "max_tokens")

# No text has one of these: JSON has a backslash before a quotation mark in a text.
_IDS = b'token_ids":['
_CHOICE = b'"finish_reason":'
_REASON = b'"finish_reason":"'
_NO_CHOICE = b'"choices":[]'
_ABORTED = b'"finish_reason":"abort"'
_ERROR = b'data: {"error"'
_SWALLOWED = b'"delta":{}'
_PARSED = re.compile(rb'"(?:reasoning|tool_calls)":(?!null)')
_EVENT_END = b"\n\n"
_DONE = b"data: [DONE]" + _EVENT_END


def may_continue(path: str, body: dict[str, Any]) -> bool:
    """Return whether the stream that a request asks for could be continued at another engine.

    Not if the rest of the answer depends on more than its tokens so far, as with a grammar, tools, a seed or
    penalties that do not count a prompt's tokens. Not if events have other content than text either.

    >>> may_continue("/v1/completions", {"prompt": "x", "stream": True, "temperature": 0.5})
    True
    >>> may_continue("/v1/completions", {"prompt": "x", "stream": True, "temperature": 0.5, "seed": 1})
    False
    """
    api = api_of(path, body)
    if api not in (CHAT, COMPLETIONS) or not body.get("stream") or has_media(body):
        return False
    if api == COMPLETIONS and not _is_one_prompt(body.get("prompt")):
        return False
    return all(
        key in _KNOWN or _is_counted(key, value) or _has_no_effect(key, value, body)
        for key, value in body.items()
    )


def _is_one_prompt(prompt: Any) -> bool:
    if not isinstance(prompt, list):
        return isinstance(prompt, str)
    return len(prompt) == 1 or (bool(prompt) and isinstance(prompt[0], int))


def _is_counted(key: str, value: Any) -> bool:
    return key in (*_LIMITS, "min_tokens") and (value is None or type(value) is int)


def _has_no_effect(key: str, value: Any, body: dict[str, Any]) -> bool:
    match key:
        case "n":
            return value in (None, 1)
        case "frequency_penalty" | "presence_penalty":
            return value is None or value == 0
        case "seed":
            return value is None or body.get("temperature") == 0
        case "response_format":
            return value is None or value == {"type": "text"}
        case "stop":
            # An engine holds back the beginning of a longer one, and the next engine would not find its end.
            stops = [value] if isinstance(value, str) else value or []
            return isinstance(stops, list) and all(isinstance(one, str) and len(one) == 1 for one in stops)
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _ends_with_whole_character(text: str) -> bool:
    # The first tokens may be the rest of a character. A special token, which the text has and the answer has
    # not, may follow a part of one.
    rest = text.lstrip(_UNKNOWN_CHARACTER)
    return bool(rest) and _UNKNOWN_CHARACTER not in rest


async def whole_characters(
    prompt: list[int],
    answer: list[int],
    most: int,
    text_of: Callable[[list[int]], Awaitable[str | None]],
) -> list[int] | None:
    """Return an answer's tokens without those at its end that are only a part of a character.

    Return None if they are unknown, or more than `most`.
    """
    for dropped in range(min(most, len(answer)) + 1):
        kept = answer[: len(answer) - dropped]
        text = await text_of([*prompt[-_TAIL_TOKENS:], *kept][-_TAIL_TOKENS:])
        if text is None:
            return None
        if _ends_with_whole_character(text):
            return kept
    return None


class Transcript(RelayedStream):
    """A stream with the token ids that its client has got the text of.

    Attributes:
        finished: True once the client has got the reason why the answer has ended.
    """

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.finished = False
        self._body, self._is_chat = body, api_of(path, body) == CHAT
        self._keeps_ids = bool(body.get("return_token_ids"))
        # Token ids are kept as the text that they have in JSON: most streams never need them.
        self._prompt: bytes | None = None
        self._tokens = bytearray()
        self._choices = self._with_tokens = 0  # numbers of events
        self._has_usage = False
        self._is_text = True
        self._first = b""

    def asks(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "return_token_ids": True}

    def take(self, events: bytes) -> bytes:
        if _ABORTED not in events and _ERROR not in events and _SWALLOWED not in events:
            return self._without_ids(events)
        found = b""
        for event in _split(events):
            # Without an event so far, another engine can begin anew.
            if (self.continuable or not self._first) and (reason := _given_up(event)):
                raise EngineGaveUp(found, reason)
            self._is_text = self._is_text and _SWALLOWED not in event
            # vLLM sends this event only because of the token ids.
            if _SWALLOWED not in event or _REASON in event or self._keeps_ids:
                found += self._without_ids(event)
        return found

    def _without_ids(self, events: bytes) -> bytes:
        self._choices += events.count(_CHOICE)
        self.finished = self.finished or _REASON in events
        self._has_usage = self._has_usage or _NO_CHOICE in events
        if self._is_chat and _PARSED.search(events):
            self._is_text = False
        found, start = b"", 0
        while (at := events.find(_IDS, start)) >= 0:
            first, end = at + len(_IDS), events.index(b"]", at)
            if events.endswith(b'"prompt_', start, at):
                self._prompt = events[first:end]
            else:
                self._with_tokens += 1
                self._tokens += b"," * (first < end) + events[first:end]
            found += events[start : end + 1] if self._keeps_ids else events[start : first - 1] + b"null"
            start = end + 1
        found += events[start:]
        self._first = self._first or found
        return found

    @property
    def continuable(self) -> bool:
        """True if the token ids of all text are known, and the events have nothing else."""
        # The first event of a chat has no text.
        return self._is_text and bool(self._prompt) and self._choices == self._with_tokens + self._is_chat

    def tokens(self) -> tuple[list[int], list[int]]:
        """Return the token ids of the prompt and of the answer so far."""
        prompt, answer = (json.loads(b"[%b]" % ids) for ids in (self._prompt or b"", bytes(self._tokens[1:])))
        return prompt, answer

    @property
    def max_dropped(self) -> int:
        """Maximum number of last tokens that the next engine may generate again."""
        # The client has these ids, or text that stands for a part of a character.
        if self._keeps_ids or self._body.get("skip_special_tokens") is False:
            return 0
        return _MAX_DROPPED

    def continued(self, path: str, prompt: list[int], answer: list[int]) -> Continuation:
        """Return the rest of the stream, after these tokens."""
        body = _continued_body(path, self._body, [*prompt, *answer], len(answer))
        return Continuation(self._identity(), body, prompt, answer, keeps_ids=self._keeps_ids)

    def end(self) -> bytes:
        """Return the lost events after the one with the reason why the answer has ended."""
        options = self._body.get("stream_options")
        if self._has_usage or not isinstance(options, dict) or not options.get("include_usage"):
            return _DONE
        prompt, answer = map(len, self.tokens())
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
        return _event({**self._identity(), "choices": [], "usage": usage}) + _DONE

    def _identity(self) -> dict[str, Any]:
        first = json.loads(next(_split(self._first)).removeprefix(b"data: "))
        return {key: first[key] for key in ("id", "object", "created", "model") if key in first}


class Continuation(RelayedStream):
    """The rest of a stream that another engine has begun.

    Attributes:
        body: body of the request for the rest.
        known: token ids of the prompt and of the answer so far.
    """

    def __init__(
        self,
        identity: dict[str, Any],
        body: dict[str, Any],
        prompt: list[int],
        answer: list[int],
        *,
        keeps_ids: bool,
    ) -> None:
        super().__init__()
        self.begun = True
        self.body, self.known = body, [*prompt, *answer]
        self._identity, self._prompt_tokens = identity, len(prompt)
        self._keeps_ids = keeps_ids
        self._is_certain = False  # True once the engine has said that it continues these tokens

    def take(self, events: bytes) -> bytes:
        found = b""
        for event in _split(events):
            chunk = json.loads(event.removeprefix(b"data: ")) if event.startswith(b"data: {") else None
            if reason := _given_up(event) or (chunk and self._why_other(chunk)):
                raise EngineGaveUp(found, reason)
            found += event if chunk is None else self._rewritten(chunk)
        return found

    def _why_other(self, chunk: dict[str, Any]) -> str | None:
        """Return why an event does not belong to the rest of the answer; None if it does."""
        choices = chunk.get("choices", ())
        if not self._is_certain:
            if self.known not in [place.get("prompt_token_ids") for place in (chunk, *choices)]:
                return "it did not continue the answer"
            self._is_certain = True
        deltas = [choice.get("delta") or {} for choice in choices]
        if any(delta.get("reasoning") or delta.get("tool_calls") for delta in deltas):
            return "its parser takes the rest of the answer for something else than text"
        return None

    def _rewritten(self, chunk: dict[str, Any]) -> bytes:
        for choice in chunk.get("choices", ()):
            if "role" in choice.get("delta", ()):
                return b""  # the client has got it
            for key in ("prompt_token_ids", *(() if self._keeps_ids else ("token_ids",))):
                if key in choice:
                    choice[key] = None
        if usage := chunk.get("usage"):
            self._count(usage)
        return _event({**chunk, **self._identity})

    def _count(self, usage: dict[str, Any]) -> None:
        """Change the usage to that of the whole stream."""
        # For the engine, the answer so far is a part of the prompt.
        usage["completion_tokens"] = usage["total_tokens"] - self._prompt_tokens
        usage["prompt_tokens"] = self._prompt_tokens
        details = usage.get("prompt_tokens_details")
        if details and (cached := details.get("cached_tokens")) is not None:
            details["cached_tokens"] = min(cached, self._prompt_tokens)


def _continued_body(path: str, body: dict[str, Any], known: Sequence[int], answered: int) -> dict[str, Any]:
    """Return the body of a request for the rest of an answer of which `answered` tokens are known."""
    kept = {key: value for key, value in body.items() if key not in _NOT_SENT_AGAIN}
    kept["return_token_ids"] = True
    if api_of(path, body) == CHAT:
        # vLLM takes these tokens in place of those of the messages.
        kept[KV_PARAMS] = {**(body.get(KV_PARAMS) or {}), "prompt_token_ids": list(known)}
    else:
        kept["prompt"] = list(known)
        if kept.get("max_tokens") is None:
            kept["max_tokens"] = _DEFAULT_LIMIT
    for limit in _LIMITS:
        if kept.get(limit) is not None:
            # Of two limits only one counts, and the other may be less than what came.
            kept[limit] = max(kept[limit] - answered, 1)
    if kept.get("min_tokens"):
        kept["min_tokens"] = max(kept["min_tokens"] - answered, 0)
    return kept


def _split(events: bytes) -> Iterator[bytes]:
    """Yield whole events, each with its end."""
    start = 0
    while start < len(events):
        at = events.find(_EVENT_END, start)
        end = len(events) if at < 0 else at + len(_EVENT_END)
        yield events[start:end]
        start = end


def _given_up(event: bytes) -> str | None:
    """Return why an engine ends an incomplete answer with this event; None if it does not."""
    if _ABORTED in event:
        return "it aborted the request"  # as vLLM does when it is stopped
    if not event.startswith(_ERROR):
        return None
    try:
        error = json.loads(event.removeprefix(b"data: "))["error"]
        code, message = error["code"], " ".join(str(error["message"]).split())[:300]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    # Other errors are those of the request.
    return f"it answered with an error: {message}" if isinstance(code, int) and code >= 500 else None


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + _EVENT_END
