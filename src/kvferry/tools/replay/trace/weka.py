"""Traces of coding agents from Weka's KV Cache Tester, and as SemiAnalysis publishes them: a session a line.

Times are in seconds from the start of the session. A sub-agent has requests of its own, also nested::

    {"id": "trace_0001", "block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 0.0, "type": "s", "in": 20064, "out": 797, "hash_ids": [1, 2, ...], "ttft": 1.2},
        {"t": 9.5, "type": "subagent", "status": "completed", "requests": [{"t": 0.0, "type": "n", ...}]},
        {"t": 80.0, "type": "s", "in": 29372, "out": 1033, "hash_ids": [1, 2, ...]}]}

An id stands for ``block_size`` tokens of the whole prompt, in its session alone if the scope is ``local``,
which old files leave out. A sub-agent begins when the request before it has ended. The next request waits for
all of them, except those with the status ``async_launched``. The times of a sub-agent's requests are from the
start of its session, or from the start of the sub-agent if the first one would be before that.

A delay is the recorded time from the first token (``t`` and ``ttft``) of what a request waits for to the
request, because a replay ends a request with its first token. So it contains the rest of the answer.

Sources: https://github.com/callanjfox/kv-cache-tester, ``docs/trace_replay_tester.md``;
https://github.com/ai-dynamo/aiperf, ``src/aiperf/dataset/loader/weka_trace_models.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import numpy as np

from kvferry.tools.replay.trace.base import (
    UNTIMED_SESSIONS,
    ArrivalTimes,
    Branch,
    FileTrace,
    Ids,
    OutputTokens,
    PromptTokens,
    Seconds,
    TraceFile,
    TraceRequest,
    UnitTokens,
    chained_each,
    decode,
    identity,
)
from kvferry.tools.replay.trace.hashed import check_count, identities
from kvferry.tools.replay.trace.workload import text_units

_NOT_AWAITED = "async_launched"


class _Call(
    msgspec.Struct, gc=False, frozen=True, tag="n", rename={"prompt_tokens": "in", "output_tokens": "out"}
):
    t: Seconds
    prompt_tokens: PromptTokens
    output_tokens: OutputTokens
    hash_ids: list[int] = []
    ttft: Seconds | None = None


class _StreamingCall(_Call, frozen=True, tag="s"):
    pass


class _SubAgent(msgspec.Struct, gc=False, frozen=True, tag="subagent"):
    t: Seconds
    status: str
    requests: list[_Call | _StreamingCall | _SubAgent]


class _Session(msgspec.Struct, gc=False, frozen=True):
    id: str
    block_size: UnitTokens
    requests: list[_Call | _StreamingCall | _SubAgent]
    hash_id_scope: Literal["local", "global"] = "local"


@dataclass(slots=True)
class _Turn:
    """A request without the identities that it shares with the turn before it, which are most of them."""

    delay: float
    prompt_tokens: int
    output_tokens: int
    shared: int  # number of units, from the first one, that are those of the turn before
    own: Ids  # identities of the content of all further units
    name: str  # unique in the trace
    branches: list[tuple[list[_Turn], bool]] = field(default_factory=list)


class WekaTrace(FileTrace):
    """A trace of sessions with sub-agents. All models in it are replayed as one."""

    def __init__(self, file: TraceFile) -> None:
        number, line = file.first_line()
        super().__init__(file, "weka", decode(msgspec.json.Decoder(_Session), line, number, file).block_size)

    def notes(self) -> list[str]:
        return [*super().notes(), UNTIMED_SESSIONS]

    def _requests(self, arrivals: ArrivalTimes) -> Iterator[TraceRequest]:
        decoder = msgspec.json.Decoder(_Session)
        for index, (number, line) in enumerate(self._file.lines()):
            session = decode(decoder, line, number, self._file)
            if session.block_size != self.unit_tokens:
                raise self._file.refusal(
                    number, f"block_size is {session.block_size} after {self.unit_tokens}; all must be equal"
                )
            reader = _Reader(self._file, number, session)
            turns = _requests_of(reader.turns, session.id, self.unit_tokens)
            if (first := next(turns, None)) is not None:
                yield replace(first, arrival=arrivals.arrival(number, float(index)), later=turns)


class _Reader:
    """Reads the turns of one session."""

    def __init__(self, file: TraceFile, number: int, session: _Session) -> None:
        self._file, self._number, self._session = file, number, session
        self._scope = identity(session.id) if session.hash_id_scope == "local" else 0
        self._count = 0
        self.turns, _ = self._read(session.requests, 0.0, 0.0)

    def _read(
        self, entries: Sequence[_Call | _SubAgent], zero: float, begin: float
    ) -> tuple[list[_Turn], float]:
        """Return turns that follow each other, and the time at which the last one ended.

        Args:
            zero: time from which the times of the entries count.
            begin: time of the end of what the first one waits for.
        """
        turns: list[_Turn] = []
        before = np.zeros(0, np.uint64)
        ended = awaited = begin  # times of the end of the latest turn, and of all that the next one waits for
        for entry in entries:
            if isinstance(entry, _SubAgent):
                is_relative = bool(entry.requests) and entry.requests[0].t < entry.t
                branch, end = self._read(entry.requests, zero + entry.t if is_relative else zero, ended)
                is_awaited = entry.status != _NOT_AWAITED
                if turns:
                    turns[-1].branches.append((branch, is_awaited))
                else:  # nothing precedes it, so it is the beginning of the session
                    turns, ended, is_awaited = branch, end, True
                awaited = max(awaited, end) if is_awaited else awaited
                continue
            own = self._own(entry)
            turns.append(self._turn(entry, max(zero + entry.t - awaited, 0.0), own, before))
            before = own
            ended = awaited = zero + entry.t + (entry.ttft or 0.0)
        return turns, awaited

    def _own(self, call: _Call) -> Ids:
        """Return the identity of the content of each unit, uint64."""
        unit, self._count = self._session.block_size, self._count + 1
        if not call.hash_ids:  # nothing is known about its content
            return text_units(identity(self._name), 0, call.prompt_tokens // unit)
        check_count(self._file, self._number, len(call.hash_ids), call.prompt_tokens, unit, states_units=True)
        found: Ids = identities(call.hash_ids) + np.uint64(self._scope)
        return found

    def _turn(self, call: _Call, delay: float, own: Ids, before: Ids) -> _Turn:
        most = min(len(own), len(before))
        differing = np.flatnonzero(own[:most] != before[:most])
        shared = int(differing[0]) if len(differing) else most
        return _Turn(delay, call.prompt_tokens, call.output_tokens, shared, own[shared:].copy(), self._name)

    @property
    def _name(self) -> str:
        return f"{self._session.id} {self._count}"


def _requests_of(turns: Sequence[_Turn], session: str, unit_tokens: int) -> Iterator[TraceRequest]:
    own = np.zeros(0, np.uint64)
    for turn in turns:
        own = np.concatenate([own[: turn.shared], turn.own])
        prefixes, whole = chained_each(own, np.array([len(own)])), turn.prompt_tokens // unit_tokens
        yield TraceRequest(
            delay=turn.delay,
            prompt_tokens=turn.prompt_tokens,
            output_tokens=turn.output_tokens,
            unit_tokens=unit_tokens,
            prefix_ids=prefixes[:whole],
            prompt_id=int(prefixes[whole]) if len(prefixes) > whole else identity(f"end of {turn.name}"),
            session=session,
            branches=[
                Branch(_requests_of(branch, session, unit_tokens), is_awaited)
                for branch, is_awaited in turn.branches
            ],
        )
