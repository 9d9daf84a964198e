"""Spans of OpenTelemetry, as a collector's file exporter writes them: JSON lines of trace data.

A request is a span with a number of prompt tokens. By the conventions for generative AI, its attributes are
``gen_ai.usage.input_tokens`` and ``gen_ai.usage.output_tokens``; vLLM's are ``gen_ai.usage.prompt_tokens``
and ``gen_ai.usage.completion_tokens``. If an application and an engine report the same request, the names of
the first request of the file count. Spans of other operations, such as ``invoke_agent``, repeat the tokens of
requests inside them.

A request continues the one before it with the same ``gen_ai.conversation.id`` or, if it has none, of the same
trace.

Sources: https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/,
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/, and ``vllm/tracing/utils.py`` of vLLM 0.32.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec
import numpy as np

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.trace.base import (
    MAX_TOKENS,
    ArrivalTimes,
    FileTrace,
    TraceFile,
    TraceRequest,
    decode,
    identity,
)
from kvferry.tools.replay.trace.csv_trace import DEFAULT_UNIT_TOKENS, Conversations
from kvferry.tools.replay.trace.workload import Outline, write_out

# Names of the numbers of prompt tokens and output tokens.
_NAMES = (
    ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
    ("gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"),
)
_CONVERSATION, _OPERATION = "gen_ai.conversation.id", "gen_ai.operation.name"
# A span without an operation is a request too: vLLM does not name it.
_OPERATIONS = frozenset({"chat", "generate_content", "text_completion", ""})
_NS_PER_SECOND = 1_000_000_000


class _Value(msgspec.Struct, gc=False, frozen=True):
    # JSON of protocol buffers writes integers of 64 bits as strings.
    intValue: int | str | None = None  # noqa: N815
    stringValue: str | None = None  # noqa: N815


class _Attribute(msgspec.Struct, gc=False, frozen=True):
    key: str
    value: _Value = _Value()


class _Span(msgspec.Struct, gc=False, frozen=True):
    traceId: str  # noqa: N815
    startTimeUnixNano: int | str  # noqa: N815
    attributes: list[_Attribute] = []


class _Scope(msgspec.Struct, gc=False, frozen=True):
    spans: list[_Span] = []


class _Resource(msgspec.Struct, gc=False, frozen=True):
    scopeSpans: list[_Scope] = []  # noqa: N815


class _Line(msgspec.Struct, gc=False, frozen=True):
    resourceSpans: list[_Resource]  # noqa: N815


class SpanTrace(FileTrace):
    """The requests among the spans of a file.

    Spans are in order of their ends, so all are read first. A request takes 28 bytes of memory.
    """

    def __init__(self, file: TraceFile, unit_tokens: int | None) -> None:
        super().__init__(file, "spans", unit_tokens or DEFAULT_UNIT_TOKENS)
        self._starts, self._sessions = array("d"), array("Q")
        self._prompts, self._outputs, self._lines = array("I"), array("I"), array("I")
        self._names: tuple[str, str] | None = None
        decoder = msgspec.json.Decoder(_Line)
        for number, line in file.lines():
            for resource in decode(decoder, line, number, file).resourceSpans:
                for scope in resource.scopeSpans:
                    for span in scope.spans:
                        self._add(number, span)
        if not self._starts:
            raise ConfigError(
                f"{file.name} has no span with {' or '.join(prompt for prompt, _ in _NAMES)}; give spans of "
                "requests to a model"
            )
        self.tells_prefixes = len(set(self._sessions)) < len(self._sessions)

    def _add(self, number: int, span: _Span) -> None:
        found = {each.key: each.value for each in span.attributes}
        if found.get(_OPERATION, _Value(stringValue="")).stringValue not in _OPERATIONS:
            return
        names = self._names or next((each for each in _NAMES if each[0] in found), None)
        if names is None or names[0] not in found:
            return
        self._names = names
        try:
            start = int(span.startTimeUnixNano) / _NS_PER_SECOND
            prompt, output = (int(found.get(name, _Value(intValue=0)).intValue or 0) for name in names)
        except ValueError as error:
            raise self._file.refusal(number, f"{error}; expected an integer") from error
        if not (1 <= prompt <= MAX_TOKENS and 0 <= output <= MAX_TOKENS):
            raise self._file.refusal(
                number,
                f"a span has {prompt:,} prompt tokens and {output:,} output tokens; expected 1 and 0 to "
                f"{MAX_TOKENS:,}",
            )
        session = found.get(_CONVERSATION, _Value()).stringValue or span.traceId
        self._starts.append(start)
        self._sessions.append(identity(session))
        self._prompts.append(prompt)
        self._outputs.append(output)
        self._lines.append(number)

    def _requests(self, arrivals: ArrivalTimes) -> Iterator[TraceRequest]:
        return write_out(self._outlines(arrivals), self.unit_tokens)

    def _outlines(self, arrivals: ArrivalTimes) -> Iterator[Outline]:
        conversations = Conversations()
        for place in np.argsort(np.frombuffer(self._starts), kind="stable"):
            number, session = self._lines[place], f"{self._sessions[place]:x}"
            prompt, output = self._prompts[place], self._outputs[place]
            passages = conversations.passages(session, int(place), prompt, output)
            yield Outline(arrivals.arrival(number, self._starts[place]), prompt, output, passages, session)
