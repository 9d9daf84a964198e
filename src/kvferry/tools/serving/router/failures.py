"""Failures of engines during one request, and requests that engines have died of or refused."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvferry.tools.serving.router.backends import Backend
from kvferry.tools.serving.router.bodies import encoded
from kvferry.tools.serving.router.replies import NO_RETRY, RETRY_LATER, ApiError, Headers, Reply

_log = logging.getLogger("kvferry.router")

_MAX_FAILURES = 2
_BUSY = (429, 503)
# A message may quote the whole prompt.
_MAX_CHARS = 300

REMEMBERED_SECONDS = 600.0
_MAX_REMEMBERED = 1000
# Keys of a body that do not change what an engine computes.
_OF_THE_CALLER = frozenset(
    {"stream", "stream_options", "user", "metadata", "request_id", "safety_identifier", "store"}
)
# The prompt, and keys that differ between requests of one kind.
_NOT_COMPARED = frozenset(
    {
        "cache_salt",
        "documents",
        "messages",
        "metadata",
        "prompt",
        "prompt_cache_key",
        "request_id",
        "safety_identifier",
        "seed",
        "session_id",
        "system",
        "tools",
        "user",
    }
)


class Failures:
    """The failures of prefill and decode engines that were working on one request.

    After two failures the router does not send the request again, because the request itself may be what
    makes the engines fail.

    Attributes:
        answered: True once an engine has answered the request to its end, so that it makes no engine fail.
    """

    def __init__(self, earlier: Sequence[str] = ()) -> None:
        self.answered = False
        self._earlier = earlier
        self._own: list[tuple[Backend, str]] = []
        self._reason = ""

    def __len__(self) -> int:
        return len(self._earlier) + len(self._own)

    @property
    def exhausted(self) -> bool:
        """True if the request must not be sent to a further engine."""
        return len(self) >= _MAX_FAILURES

    @property
    def latest(self) -> str:
        """Why the engine failed that was the last to fail; empty if none has."""
        return self._reason

    def add(self, backend: Backend, reason: str) -> None:
        self._reason = reason
        self._own.append((backend, f"{backend}: {reason}"))

    def deaths(self) -> dict[tuple[str, int], str]:
        """Return descriptions of the engines that failed and are down now, by (URL, times it was lost)."""
        return {(backend.url, backend.losses): text for backend, text in self._own if not backend.up}

    def reply(self, path: str, reply_headers: Headers) -> Reply:
        """Return and log an error reply that lists the failures. `reply_headers` begin with x-request-id."""
        engines = "; ".join([*self._earlier, *(text for _, text in self._own)])
        count = "one engine" if len(self) == 1 else f"{len(self)} engines"
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


# Time and description by (URL of the engine, how often it had been lost). Copies of a request that were under
# way at one engine have one death in common.
_Deaths = dict[tuple[str, int], tuple[float, str]]


class Suspects:
    """Requests during which engines died. The least recently remembered one is dropped."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deaths: OrderedDict[bytes, _Deaths] = OrderedDict()

    def __len__(self) -> int:
        return len(self._deaths)

    def begin(self, path: str, body: Mapping[str, Any]) -> Failures:
        """Return the failures of a request so far: the deaths of engines during equal ones."""
        since = self._clock() - REMEMBERED_SECONDS
        while self._deaths and max(at for at, _ in next(iter(self._deaths.values())).values()) <= since:
            self._deaths.popitem(last=False)
        # Digesting a long prompt costs time, and nearly always no engine has died.
        if not self._deaths:
            return Failures()
        deaths = self._deaths.get(_digest(path, body, _OF_THE_CALLER), {})
        return Failures([text for at, text in deaths.values() if at > since])

    def end(self, path: str, body: Mapping[str, Any], failures: Failures) -> None:
        """Remember a request during which an engine died, and forget one that was answered."""
        died = failures.deaths()
        if not died and not (failures.answered and self._deaths):
            return
        digest, now = _digest(path, body, _OF_THE_CALLER), self._clock()
        if failures.answered:
            self._deaths.pop(digest, None)
            return
        known = self._deaths.setdefault(digest, {})
        self._deaths.move_to_end(digest)
        known |= {death: (now, text) for death, text in died.items()}
        if len(self._deaths) > _MAX_REMEMBERED:
            self._deaths.popitem(last=False)


class Refusals:
    """Fields of requests that decode engines have refused. The least recently refused ones are dropped."""

    def __init__(self) -> None:
        self._refused: OrderedDict[bytes, None] = OrderedDict()

    def includes(self, path: str, body: Mapping[str, Any]) -> bool:
        """Return whether a request with equal fields was refused, and none was accepted since."""
        # Digesting costs time, and nearly always nothing was refused.
        return bool(self._refused) and _digest(path, body, _NOT_COMPARED) in self._refused

    def add(self, path: str, body: Mapping[str, Any]) -> None:
        self._refused[_digest(path, body, _NOT_COMPARED)] = None
        if len(self._refused) > _MAX_REMEMBERED:
            self._refused.popitem(last=False)

    def discard(self, path: str, body: Mapping[str, Any]) -> None:
        self._refused.pop(_digest(path, body, _NOT_COMPARED), None)


def _digest(path: str, body: Mapping[str, Any], left_out: frozenset[str]) -> bytes:
    kept = {key: value for key, value in body.items() if key not in left_out}
    return hashlib.blake2b(encoded([path, kept], sort_keys=True), digest_size=16).digest()
