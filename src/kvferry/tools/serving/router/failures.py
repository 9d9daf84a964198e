"""Count the failures of engines during one request."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from kvferry.tools.serving.router.backends import Backend
from kvferry.tools.serving.router.replies import NO_RETRY, RETRY_LATER, ApiError, Headers, Reply

_log = logging.getLogger("kvferry.router")

_MAX_FAILURES = 2
_BUSY = (429, 503)
# A message may quote the whole prompt.
_MAX_CHARS = 300


class Failures:
    """The failures of prefill and decode engines that were working on one request.

    After two failures the router does not send the request again, because the request itself may be what
    makes the engines fail.

    Attributes:
        answered: True once an engine has answered the request to its end, so that it makes no engine fail.
    """

    def __init__(self, earlier: Sequence[str] = ()) -> None:
        """Begin with descriptions of engines that died lately during equal requests."""
        self.answered = False
        self._seen = [*earlier]
        self._earlier = len(earlier)
        self._engines: list[Backend] = []

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def exhausted(self) -> bool:
        """True if the request must not be sent to a further engine."""
        return len(self._seen) >= _MAX_FAILURES

    def add(self, backend: Backend, reason: str) -> None:
        """Record that an engine closed the connection, was silent or answered with a server error."""
        self._seen.append(f"{backend.role} engine {backend.url}: {reason}")
        self._engines.append(backend)

    def deaths(self) -> dict[tuple[str, int], str]:
        """Return descriptions of the engines that failed and are down now, by (URL, times it was lost)."""
        failed = zip(self._engines, self._seen[self._earlier :], strict=True)
        return {(backend.url, backend.losses): text for backend, text in failed if not backend.up}

    def reply(self, path: str, reply_headers: Headers) -> Reply:
        """Return the error reply that lists the failures, and log that the request is not tried again.

        Args:
            path: path of the request.
            reply_headers: the first is x-request-id, which is logged.
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
            # OpenAI's clients repeat a request after a 5xx status, and this one may end more engines.
            status, header = 500, NO_RETRY
        else:
            message = f"{count} failed while working on this request, and no other is left ({engines})"
            # One engine may fail for other reasons than the request, such as being stopped.
            status, header = 503, RETRY_LATER
        return ApiError(status, message, "engine_failed", (header,)).reply(path)


def is_busy(status: int) -> bool:
    """Return whether an HTTP status means that the engine rejected the request because it is busy."""
    return status in _BUSY


def is_failure(status: int) -> bool:
    """Return whether an HTTP status means that the engine failed. vLLM answers 500 if its core has died."""
    return status >= 500 and not is_busy(status)


def failure_of(reply: Reply) -> str:
    """Return an engine's error answer as text: its status and, if it has one, its shortened message."""
    try:
        message = str(json.loads(reply.body)["error"]["message"])[:_MAX_CHARS]
        message = " ".join(message.split())  # on one line of the log
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"status {reply.status}"
    return f"status {reply.status}: {message}"
