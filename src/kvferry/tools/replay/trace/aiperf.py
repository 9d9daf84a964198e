"""AIPerf's traces of sessions: each line is a turn, with what it adds to its session.

The first turn of a session has a time, each later one a delay after the end of the turn before, in
milliseconds::

    {"session_id": "a", "input_length": 1536, "output_length": 320, "hash_ids": [0, 1, 2], "timestamp": 0.0}
    {"session_id": "a", "input_length": 768, "output_length": 180, "hash_ids": [1000, 1001], "delay": 2450.3}

The prompt of a turn consists of the prompt and the answer of the turn before, and of ``input_length`` new
tokens. An id stands for 512 new tokens, the last one of a turn for the rest.

The ids of a first turn tell which sessions begin alike. Nothing is known about answers, so from the first
answer on, the content of a session is equal to no other's.

Source: https://github.com/ai-dynamo/aiperf, ``src/aiperf/dataset/agentic_code_gen/README.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from kvferry.common.text import shown
from kvferry.tools.replay.trace.base import (
    MAX_SECONDS,
    MAX_TOKENS,
    UNTIMED_SESSIONS,
    ArrivalTimes,
    FileTrace,
    OutputTokens,
    PromptTokens,
    TraceFile,
    TraceRequest,
    chained_each,
    decode,
    identity,
)
from kvferry.tools.replay.trace.hashed import check_count, identities
from kvferry.tools.replay.trace.workload import text_prompt, text_units

_UNIT_TOKENS = 512
_MS_PER_SECOND = 1000
_DELTAS = "deltas_without_responses"


class _Row(msgspec.Struct, gc=False, frozen=True):
    session_id: str
    input_length: PromptTokens
    output_length: OutputTokens = 0
    hash_ids: list[int | str] = []
    timestamp: float | None = None
    delay: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS * _MS_PER_SECOND)] = 0.0
    context_mode: str = _DELTAS


class _Turn(NamedTuple):
    delay: float
    new_tokens: int
    output_tokens: int


class AIPerfTrace(FileTrace):
    """A trace of AIPerf. The turns of a session follow each other in the file."""

    def __init__(self, file: TraceFile, unit_tokens: int | None) -> None:
        super().__init__(file, "aiperf", unit_tokens or _UNIT_TOKENS)
        number, line = file.first_line()
        self._timed = decode(msgspec.json.Decoder(_Row), line, number, file).timestamp is not None

    def notes(self) -> list[str]:
        return [*super().notes(), *[UNTIMED_SESSIONS] * (not self._timed)]

    def _requests(self, arrivals: ArrivalTimes) -> Iterator[TraceRequest]:
        known = set[int]()
        for index, (session, rows) in enumerate(groupby(self._rows(), lambda each: each[1].session_id)):
            number, row = next(rows)
            if (seed := identity(session)) in known:
                raise self._file.refusal(
                    number,
                    f"the session {shown(session)} goes on after the lines of another one",
                    "put all turns of a session on consecutive lines",
                )
            known.add(seed)
            if (row.timestamp is not None) != self._timed:
                raise self._file.refusal(
                    number,
                    "only some sessions begin with a timestamp",
                    "give the first turn of each session a timestamp, or none",
                )
            time = float(index) if row.timestamp is None else row.timestamp / _MS_PER_SECOND
            turns = self._turns(row, [self._later(number, each) for number, each in rows])
            yield replace(next(turns), arrival=arrivals.arrival(number, time), later=turns)

    def _rows(self) -> Iterator[tuple[int, _Row]]:
        decoder = msgspec.json.Decoder(_Row)
        tokens, session = 0, ""
        for number, line in self._file.lines():
            row = decode(decoder, line, number, self._file)
            if row.context_mode != _DELTAS:
                raise self._file.refusal(
                    number,
                    f"context_mode is {shown(row.context_mode)}; only {_DELTAS} is read",
                    "give what each turn adds to its session",
                )
            if row.hash_ids:
                check_count(
                    self._file,
                    number,
                    len(row.hash_ids),
                    row.input_length,
                    self.unit_tokens,
                    states_units=False,
                )
            tokens = row.input_length + row.output_length + (tokens if row.session_id == session else 0)
            session = row.session_id
            if tokens > MAX_TOKENS:
                raise self._file.refusal(
                    number, f"the session has {tokens:,} tokens so far; expected at most {MAX_TOKENS:,}"
                )
            yield number, row

    def _later(self, number: int, row: _Row) -> _Turn:
        if row.timestamp is not None:
            raise self._file.refusal(
                number,
                "a later turn of a session has a timestamp",
                "give its delay after the end of the turn before",
            )
        return _Turn(row.delay / _MS_PER_SECOND, row.input_length, row.output_length)

    def _turns(self, first: _Row, later: Sequence[_Turn]) -> Iterator[TraceRequest]:
        """Yield the requests of a session. Each holds the identities of the whole prompt."""
        seed, unit, tokens = identity(first.session_id), self.unit_tokens, 0
        prefixes = chained_each(identities(first.hash_ids), np.array([len(first.hash_ids)]))
        whole = first.input_length // unit
        shared, rest = prefixes[:whole], prefixes[whole:].tolist()
        for turn in (_Turn(0.0, first.input_length, first.output_length), *later):
            prompt = tokens + turn.new_tokens
            tokens = prompt + turn.output_tokens
            own = text_units(seed, len(shared), tokens // unit)
            yield TraceRequest(
                delay=turn.delay,
                prompt_tokens=prompt,
                output_tokens=turn.output_tokens,
                unit_tokens=unit,
                prefix_ids=np.concatenate([shared, own]),
                prompt_id=rest.pop() if rest else text_prompt(seed, prompt),
                session=first.session_id,
            )
