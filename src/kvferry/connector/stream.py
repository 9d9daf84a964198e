"""The stream of events: code that makes a decision emits an event, and all listeners receive it.

Requests that a source refuses also have lines in the log, at a limited rate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import ParamSpec, TypeAlias

from kvferry.connector.events import Event, SourceRefused, TierEvent
from kvferry.limited_log import LimitedLog
from kvferry.terminal import shown

logger = logging.getLogger(__name__)
_SHOWN = 1000
MAX_ID_CHARACTERS = 256
"""Maximum length of a request id in an event. The middle of a longer id is left out."""

_P = ParamSpec("_P")

Listener: TypeAlias = Callable[[Event], None]


def log_errors(emit: Callable[_P, None]) -> Callable[_P, None]:
    """Return a function that calls `emit` and never raises. Only the first exception is logged.

    An error in the code that observes a request must not affect the request.
    """
    logged = False

    @wraps(emit)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        nonlocal logged
        try:
            emit(*args, **kwargs)
        except Exception:
            if not logged:
                logger.exception("%s emitted no event; tell kvferry's authors", emit.__qualname__)
            logged = True

    return guarded


class EventStream:
    """Passes the events of one engine to its listeners, in the thread that emits them. Not thread-safe."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = list(listeners)

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with every event from now on."""
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        """Call every listener with the event. A long request id is shortened to `MAX_ID_CHARACTERS`.

        A listener that raises is removed, and the exception is logged.
        """
        event = _with_short_id(event)
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:
                self._listeners.remove(listener)
                logger.exception(
                    "%r failed at %s and receives no more events: what it shows stands still, requests are "
                    "served as before; tell kvferry's authors",
                    listener, shown(repr(event), _SHOWN),
                )  # fmt: skip


def short_id(request_id: str) -> str:
    """Return a request's id as events have it. Clients choose ids of any length."""
    return request_id if len(request_id) <= MAX_ID_CHARACTERS else shown(request_id, MAX_ID_CHARACTERS)


def _with_short_id(event: Event) -> Event:
    if isinstance(event, TierEvent) or len(event.request_id) <= MAX_ID_CHARACTERS:
        return event
    return replace(event, request_id=short_id(event.request_id))


_REASON_CHARACTERS = 500


class Refusals:
    """Reports the requests that a source of KV does not serve: an event for each, and some log lines.

    Each pair of source and reason is logged at most once a minute, and at most 20 lines are logged a minute.
    """

    def __init__(self, events: EventStream | None = None) -> None:
        self._events = events or EventStream()
        self._log = LimitedLog(logger)

    def say(self, request_id: str, source: str, reason: str) -> None:
        """Report that a source of KV does not serve a request.

        Emit a `SourceRefused` event. Also write a log line, unless the class's limit on log lines is reached.

        Args:
            request_id: id of the request.
            source: name of the source, for example the name of a peer.
            reason: reason as text for people.
        """
        source, reason = shown(source), shown(reason, _REASON_CHARACTERS)
        self._events.emit(SourceRefused(request_id, time.monotonic(), source, reason))
        text = f"request {shown(request_id)} is not served by {source}: {reason}"
        self._log.say(f"{source}: {reason}", text)
