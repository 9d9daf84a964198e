"""Conversations as text, as vLLM's benchmark of multi-turn requests reads them: one JSON array.

::

    [{"id": "a", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}]

Each message of the role ``assistant`` answers all messages before it, so it is a request. Its prompt is their
text. A message that nobody answers, the last one, is a request without an answer. Tokens and times are
assumed: a token for each `BYTES_PER_TOKEN` bytes, and none for a chat template.

Source: https://github.com/vllm-project/vllm, ``benchmarks/multi_turn``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import cast

import msgspec
import numpy as np

from kvferry.common.errors import ConfigError
from kvferry.common.text import shown
from kvferry.tools.replay.trace.base import (
    MAX_LINE_BYTES,
    UNTIMED_SESSIONS,
    ArrivalTimes,
    FileTrace,
    Ids,
    TraceFile,
    TraceRequest,
    chained_each,
    identity,
    mixed,
)

BYTES_PER_TOKEN = 4
_UNIT_TOKENS = 16
_SHOWN_CHARACTERS = 80
_DECODER, _BETWEEN = json.JSONDecoder(), re.compile(r"[\s,]*")


class _Message(msgspec.Struct, gc=False, frozen=True):
    role: str
    content: str


class _Conversation(msgspec.Struct, gc=False, frozen=True):
    id: str | int
    messages: list[_Message]


class ConversationTrace(FileTrace):
    """Conversations in a JSON array, which is read one conversation at a time."""

    def __init__(self, file: TraceFile, unit_tokens: int | None) -> None:
        super().__init__(file, "conversations", unit_tokens or _UNIT_TOKENS)

    def notes(self) -> list[str]:
        assumed = f"the trace has text; a token is assumed for each {BYTES_PER_TOKEN} bytes of it"
        return [*super().notes(), assumed, UNTIMED_SESSIONS]

    def _requests(self, arrivals: ArrivalTimes) -> Iterator[TraceRequest]:
        for index, (number, item) in enumerate(self._items()):
            try:
                conversation = msgspec.convert(item, _Conversation)
            except msgspec.ValidationError as error:
                raise self._file.refusal(
                    number,
                    f"{error}, in {shown(str(item), _SHOWN_CHARACTERS)}",
                    'give each conversation an "id" and "messages", each with a "role" and "content" as text',
                ) from error
            turns = self._turns(conversation)
            if (first := next(turns, None)) is not None:
                yield replace(first, arrival=arrivals.arrival(number, float(index)), later=turns)

    def _items(self) -> Iterator[tuple[int, object]]:
        """Yield the elements of the array, each with the number of a line by which it has ended."""
        text, least, number = "", 0, 0
        for number, line in self._file.lines():
            text += line.decode(errors="replace")
            # An element may have many lines. It is scanned again only with twice as much text.
            if len(text) < least:
                continue
            text = yield from self._complete(number, text if least else text.lstrip().removeprefix("["))
            least = 2 * len(text) + 1
            if least > MAX_LINE_BYTES:
                raise self._refusal(number, text)
        text = yield from self._complete(number, text)
        if text.strip() != "]":
            raise self._refusal(number, text)

    def _complete(self, number: int, text: str) -> Generator[tuple[int, object], None, str]:
        """Yield the complete elements at the start of a text, and return the rest of it."""
        at = 0
        while True:
            at = cast("re.Match[str]", _BETWEEN.match(text, at)).end()
            try:
                item, at = _DECODER.raw_decode(text, at)
            except ValueError:
                return text[at:]
            except RecursionError as error:
                raise self._refusal(number, text[at:]) from error
            yield number, item

    def _refusal(self, number: int, text: str) -> ConfigError:
        return self._file.refusal(
            number,
            f"found {shown(text, _SHOWN_CHARACTERS) or 'the end of the file'}; expected a JSON object or ]",
            "give a complete array of conversations",
        )

    def _turns(self, conversation: _Conversation) -> Iterator[TraceRequest]:
        texts = [message.content.encode(errors="replace") for message in conversation.messages]
        all_text = b"".join(texts)
        prefixes, unit_bytes = self._prefixes(all_text), self.unit_tokens * BYTES_PER_TOKEN
        end = 0
        for message, text in zip(conversation.messages, texts, strict=True):
            prompt, end = end if message.role == "assistant" else end + len(text), end + len(text)
            if prompt < BYTES_PER_TOKEN or (prompt == end and text is not texts[-1]):
                continue
            whole = prompt // unit_bytes
            rest = all_text[whole * unit_bytes : prompt].hex()
            yield TraceRequest(
                prompt_tokens=prompt // BYTES_PER_TOKEN,
                output_tokens=end // BYTES_PER_TOKEN - prompt // BYTES_PER_TOKEN,
                unit_tokens=self.unit_tokens,
                prefix_ids=prefixes[: end // unit_bytes],
                prompt_id=identity(f"{prefixes[whole - 1] if whole else ''} {rest}"),
                session=str(conversation.id),
            )

    def _prefixes(self, text: bytes) -> Ids:
        """Return the identity of the prefix that ends at each whole unit of a text."""
        units = len(text) // (self.unit_tokens * BYTES_PER_TOKEN)
        words = np.frombuffer(text, "<u4", units * self.unit_tokens).reshape(units, self.unit_tokens)
        own = np.zeros(units, np.uint64)
        for column in words.T:
            own = mixed(own + column)
        return chained_each(own, np.array([units]))
