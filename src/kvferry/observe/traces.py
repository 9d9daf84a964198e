"""What was told of the last requests, so that one can be explained.

The engine's thread tells; any other may look. Nobody waits for anybody: what is looked at is copied by
single calls of the interpreter, which no other thread sees half done. What is told often of one request
(chunks stored, signs of life) is summed up, of the rest the first and the last is kept, and long texts are
cut: a request has at most `FIRST` + `LAST` events, and all together `EVENTS` for each on average.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import get_args

from kvferry.observe import events
from kvferry.observe.events import Event, OfRequest

EVENTS = 16
"""On average, of every request that there is room for."""
FIRST, LAST = 32, 32
"""Events of one request at most, from either end."""
LONGEST = 500
"""Characters of a text."""

_OF_REQUEST = get_args(OfRequest)


@dataclass(frozen=True, slots=True)
class Stored:
    """Chunks of a request and a KV cache group that were to be copied to host memory.

    Attributes:
        group: number and kind of the group.
        ordered, done, failed: how many chunks.
        size: bytes of those done.
        first, last: when the first was ordered, and the last was done or had failed; seconds.
        failure: of the last that failed.
    """

    group: str
    ordered: int
    first: float
    done: int = 0
    failed: int = 0
    size: int = 0
    last: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """What was told of one request until now.

    Attributes:
        request_id: vLLM's.
        events: in their order, without those summed up below.
        left_out: how many are missing after the first `FIRST` of them.
        stored: by group.
        heard: signs of life of the consumer of its lease.
    """

    request_id: str
    events: tuple[OfRequest, ...]
    left_out: int = 0
    stored: tuple[Stored, ...] = ()
    heard: int = 0


@dataclass(slots=True)
class _Kept:
    """A trace that grows."""

    request_id: str
    events: list[OfRequest] = field(default_factory=list)
    left_out: int = 0
    stored: dict[str, Stored] = field(default_factory=dict)
    heard: int = 0

    def copy(self) -> Trace:
        """As it is now; in any thread."""
        told, stored = tuple(self.events), tuple(self.stored.copy().values())
        return Trace(self.request_id, told, self.left_out, stored, self.heard)


class Traces:
    """See the module: call it with every event."""

    def __init__(self, requests: int) -> None:
        """Args: requests: how many are remembered, those that came last."""
        self._most = requests
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._events = 0
        self._stores: dict[str, events.StoreBegan] = {}

    def __len__(self) -> int:
        """Requests that are remembered."""
        return len(self._kept)

    def __call__(self, event: Event) -> None:
        """Remember what has happened to a request."""
        if isinstance(event, events.Arrived):
            self._begin(event)
        elif not isinstance(event, _OF_REQUEST):
            return
        elif (kept := self._kept.get(event.request_id)) is not None:
            self._add(kept, event)
        elif isinstance(event, events.StoreEnded):
            self._stores.pop(event.store, None)

    def last(self) -> Iterator[Trace]:
        """Traces of the requests that came last, the latest first; in any thread."""
        return (kept.copy() for kept in reversed(list(self._kept.values())))

    def _begin(self, event: events.Arrived) -> None:
        self._forget(event.request_id)
        self._kept[event.request_id] = _Kept(event.request_id, [_cut(event)])
        self._events += 1
        while len(self._kept) > self._most or self._events > self._most * EVENTS:
            self._forget(next(iter(self._kept)))

    def _forget(self, request_id: str) -> None:
        if (kept := self._kept.pop(request_id, None)) is not None:
            self._events -= len(kept.events)

    def _add(self, kept: _Kept, event: OfRequest) -> None:
        if isinstance(event, events.LeaseExtended):
            kept.heard += 1
        elif isinstance(event, events.StoreBegan):
            self._stores[event.store] = event
            so_far = kept.stored.get(event.group) or Stored(event.group, 0, event.at)
            kept.stored[event.group] = replace(so_far, ordered=so_far.ordered + event.chunks)
        elif isinstance(event, events.StoreEnded):
            if (began := self._stores.pop(event.store, None)) is not None and began.group in kept.stored:
                kept.stored[began.group] = _ended(kept.stored[began.group], began.chunks, event)
        else:
            kept.events.append(_cut(event))
            if len(kept.events) > FIRST + LAST:
                del kept.events[FIRST]
                kept.left_out += 1
            else:
                self._events += 1


def _ended(stored: Stored, chunks: int, event: events.StoreEnded) -> Stored:
    if event.failure:
        return replace(stored, failed=stored.failed + chunks, last=event.at, failure=_short(event.failure))
    return replace(stored, done=stored.done + chunks, size=stored.size + event.size, last=event.at)


def _cut(event: OfRequest) -> OfRequest:
    """Without what is too long of its texts: they may be a peer's."""
    if all(len(text) <= LONGEST for text in _texts(event)):
        return event
    if isinstance(event, events.Refused):
        return replace(event, reason=_short(event.reason))
    if isinstance(event, events.LoadEnded):
        return replace(event, failure=_short(event.failure))
    if isinstance(event, events.Arrived):
        headers = tuple((name, _short(value)) for name, value in event.trace_headers)
        return replace(event, declined=_short_lacks(event.declined), trace_headers=headers)
    if isinstance(event, events.Asked):
        bids = tuple(replace(one, struck=_short(one.struck)) for one in event.bids)
        return replace(event, bids=bids, lacks=_short_lacks(event.lacks))
    return event


def _texts(event: OfRequest) -> list[str]:
    """Those that others may have made long."""
    if isinstance(event, events.Asked):
        return [*(one.struck for one in event.bids), *(one.detail for one in event.lacks)]
    if isinstance(event, events.Arrived):
        return [*(value for _, value in event.trace_headers), *(one.detail for one in event.declined)]
    if isinstance(event, events.LoadEnded):
        return [event.failure]
    return [event.reason] if isinstance(event, events.Refused) else []


def _short_lacks(lacks: tuple[events.Lack, ...]) -> tuple[events.Lack, ...]:
    return tuple(replace(one, detail=_short(one.detail)) for one in lacks)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
