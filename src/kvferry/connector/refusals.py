"""Reports of requests that a source cannot serve: an event for each, and a limited number of log lines."""

from __future__ import annotations

import logging
import time

from kvferry.connector.events import SourceRefused
from kvferry.connector.stream import EventStream
from kvferry.limited_log import LimitedLog
from kvferry.terminal import shown

logger = logging.getLogger(__name__)

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
