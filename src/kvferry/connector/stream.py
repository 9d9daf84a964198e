"""The stream of events. Code that makes a decision emits an event, and all listeners receive it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import ParamSpec, TypeAlias

from kvferry.connector.events import Event, TierEvent
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
