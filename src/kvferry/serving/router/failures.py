"""Count the failures of engines during one request.

The request itself may make engines fail, so it is retried on only one further engine. `suspects` remembers
engines that died during it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from kvferry.serving.router.backends import Backend
from kvferry.serving.router.replies import NO_RETRY, RETRY_LATER, ApiError, Headers, Reply

_log = logging.getLogger("kvferry.router")

_MAX_FAILURES = 2
_BUSY = (429, 503)
_MAX_CHARS = 300


class Failures:
    """The failures of prefill and decode engines that were working on one request.

    An engine that refuses the connection or is busy is not recorded, because it never worked on the request.
    After two failures the router does not send the request again, because the request itself may be what
    makes the engines fail.

    Attributes:
        answered: True once an engine has answered the request to its end, so that it makes no engine fail.
    """

    def __init__(self, earlier: Sequence[str] = ()) -> None:
        """Begin to count.

        Args:
            earlier: descriptions of engines that died lately during equal requests.
        """
        self.answered = False
        self._seen = [*earlier]
        self._earlier = len(earlier)
        self._engines: list[Backend] = []

    def __len__(self) -> int:
        """Return the number of times that an engine failed during the request."""
        return len(self._seen)

    @property
    def exhausted(self) -> bool:
        """Return whether the request must not be sent to a further engine, because two engines failed."""
        return len(self._seen) >= _MAX_FAILURES

    def add(self, backend: Backend, reason: str) -> None:
        """Record that an engine closed the connection, timed out or answered with a server error.

        Args:
            backend: engine that failed.
            reason: description of the failure.
        """
        self._seen.append(f"{backend.role} engine {backend.url}: {reason}")
        self._engines.append(backend)

    def deaths(self) -> dict[tuple[str, int], str]:
        """Return descriptions of the engines that failed and are down now, by (URL, times it was lost)."""
        failed = zip(self._engines, self._seen[self._earlier :], strict=True)
        return {(backend.url, backend.losses): text for backend, text in failed if not backend.up}

    def reply(self, path: str, reply_headers: Headers) -> Reply:
        """Return the error reply that lists the failures, and log that the request is not tried again.

        After two failures a header of the reply tells the client not to send the request again. One engine
        may fail for other reasons than the request, such as being stopped, so the client may try again.

        Args:
            path: path of the request.
            reply_headers: headers that the caller adds when it sends the reply. The method only reads the
                first one, x-request-id, for the log.
        """
        engines = "; ".join(self._seen)
        count = "one engine" if len(self._seen) == 1 else f"{len(self._seen)} engines"
        _log.error(
            "request %s is not tried again: %s failed while working on it (%s)",
            reply_headers[0][1].decode(errors="replace"), count, engines,
        )  # fmt: skip
        if self.exhausted:
            equal = " or an equal one" if self._earlier else ""
            message = (
                f"{count} failed while working on this request{equal}, which is not tried again ({engines})"
            )
            status, header = 500, NO_RETRY
        else:
            message = f"{count} failed while working on this request, and no other is left ({engines})"
            status, header = 503, RETRY_LATER
        return ApiError(status, message, "engine_failed", (header,)).reply(path)


def is_busy(status: int) -> bool:
    """Return whether an HTTP status means that the engine rejected the request because it is busy."""
    return status in _BUSY


def is_failure(status: int) -> bool:
    """Return whether an HTTP status means that the engine failed. vLLM answers 500 if its core has died."""
    return status >= 500 and not is_busy(status)


def failure_of(reply: Reply) -> str:
    """Return a text about an engine's error answer: its status and, if it has one, its shortened message."""
    try:
        message = str(json.loads(reply.body)["error"]["message"])[:_MAX_CHARS]
        message = " ".join(message.split())  # on one line of the log
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"status {reply.status}"
    return f"status {reply.status}: {message}"
