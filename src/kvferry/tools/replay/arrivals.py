"""The order in which the requests of a trace arrive: at recorded times, or when earlier ones have ended.

A trace yields the first turns of its sessions, and each of these has the turns that follow. A request with a
recorded time is a session of one turn. So all turns that wait for their time form one heap::

    trace ─▶ first turns ─▶ heap by time ─▶ pop ─▶ an engine ends the turn ─▶ ended
                              ▲                                                │
                              └────── later turns, branches, next sessions ◀───┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

from kvferry.tools.replay.content import RequestKeys, in_batches
from kvferry.tools.replay.trace.base import TraceRequest

# Returns the keys of the chunks of each request, and those of its runs of blocks.
KeysOfEach: TypeAlias = Callable[[Sequence[TraceRequest]], tuple[list[RequestKeys], list[RequestKeys]]]

_NEVER = float("inf")


@dataclass(slots=True)
class _Line:
    """Turns of which each begins when the one before has ended: a session, or a branch of one."""

    later: Iterator[TraceRequest]
    then: Callable[[float], None]  # called with the time at which the last turn has ended
    awaited: int = 0  # number of turns and branches that must end before the next turn begins


class Arrived(NamedTuple):
    """A request that has arrived, and has not been admitted yet."""

    request: TraceRequest
    keys: RequestKeys
    block_keys: RequestKeys
    line: _Line


class Arrivals:
    """The requests of a trace that have not arrived yet.

    Attributes:
        depend_on_ends: True if requests have arrived, or will, because others have ended.

    Args:
        requests: first turns, in order of arrival.
        concurrency: number of sessions at once. Each further one begins when another has ended, whatever the
            time of its first turn is. 0 if sessions begin at their times.
        ahead_seconds: time before its arrival at which a request with a recorded time is known.
        on_known: called with the present time, the time of arrival and the request, when these are known.
    """

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        keys_of_each: KeysOfEach,
        concurrency: int = 0,
        *,
        ahead_seconds: float = 0.0,
        on_known: Callable[[float, float, TraceRequest], None] | None = None,
    ) -> None:
        self._keys_of_each, self._is_limited = keys_of_each, concurrency > 0
        self._firsts = self._first_turns(requests)
        # A later turn gets its keys when it arrives, because they take more memory than the request.
        self._waiting: list[tuple[float, int, TraceRequest, _Line, Arrived | None]] = []
        self._count, self.depend_on_ends = 0, self._is_limited
        self._ahead_seconds, self._on_known = ahead_seconds, on_known
        self._newest_first = 0.0  # time of the latest first turn that is known
        for _ in range(concurrency or 1):
            self._begin_session(0.0)

    @property
    def time(self) -> float:
        """Seconds from the start of the trace to the next arrival; infinite if none is known yet."""
        return self._waiting[0][0] if self._waiting else _NEVER

    def pop(self) -> Arrived:
        """Return the next request. When it has ended, the caller must call `ended`."""
        at, _, request, line, first = heappop(self._waiting)
        if first is None or request.arrival != at:
            request = replace(request, arrival=at)
        if first is None:
            (keys,), (block_keys,) = self._keys_of_each([request])
            return Arrived(request, keys, block_keys, line)
        if not self._is_limited:
            self._begin_session(at)
            while self._newest_first < at + self._ahead_seconds and self._begin_session(at):
                pass
        return first if first.request is request else first._replace(request=request)

    def ended(self, arrived: Arrived, now: float) -> None:
        """Schedule what waits for the end of a request."""
        line, branches = arrived.line, arrived.request.branches
        line.awaited = 1 + sum(branch.is_awaited for branch in branches)
        for branch in branches:
            then = partial(self._release, line) if branch.is_awaited else _nothing
            self._go_on(_Line(branch.turns, then), now)
        self._release(line, now)

    def at_once(self) -> Iterator[Arrived]:
        """Yield all requests in their order if each ends when it arrives."""
        while self._waiting:
            arrived = self.pop()
            yield arrived
            self.ended(arrived, arrived.request.arrival)

    def _release(self, line: _Line, now: float) -> None:
        line.awaited -= 1
        if not line.awaited:
            self._go_on(line, now)

    def _go_on(self, line: _Line, now: float) -> None:
        if (turn := next(line.later, None)) is None:
            line.then(now)
        else:
            self.depend_on_ends = True
            self._push(now, now + turn.delay, turn, line)

    def _begin_session(self, now: float) -> bool:
        """Schedule the next first turn. Return False if there is none."""
        if (first := next(self._firsts, None)) is None:
            return False
        self._newest_first = now if self._is_limited else first.request.arrival
        self._push(now, self._newest_first, first.request, first.line, first)
        return True

    def _push(
        self, now: float, at: float, request: TraceRequest, line: _Line, first: Arrived | None = None
    ) -> None:
        self._count += 1
        if self._on_known is not None:
            self._on_known(now, at, request)
        heappush(self._waiting, (at, self._count, request, line, first))

    def _first_turns(self, requests: Iterable[TraceRequest]) -> Iterator[Arrived]:
        def then(now: float) -> None:
            if self._is_limited:
                self._begin_session(now)

        for batch in in_batches(requests):
            lines = [_Line(request.later, then) for request in batch]
            yield from map(Arrived._make, zip(batch, *self._keys_of_each(batch), lines, strict=True))


def _nothing(_: float) -> None:
    """Do nothing at the end of a line for which nothing waits."""
