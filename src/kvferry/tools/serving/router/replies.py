"""Complete HTTP answers, and errors in the form of vLLM's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `kvferry doctor` builds requests as the router does, and works without Starlette
    from starlette.types import Send

Headers = tuple[tuple[bytes, bytes], ...]
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
JSON_TYPE = (b"content-type", b"application/json")
# OpenAI's clients repeat a request after a 5xx status, unless this header tells them not to.
NO_RETRY = (b"x-should-retry", b"false")

# vLLM's names for errors, by HTTP status. Others have the status's name.
_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

# Anthropic's names, by HTTP status. Others have the type ``api_error``.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
}

# About the time in which an engine may have been started again, in seconds.
RETRY_LATER = (b"retry-after", b"10")


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete HTTP answer. Its headers have no content-length, which `send` adds."""

    status: int
    headers: Headers
    body: bytes

    async def send(self, send: Send, extra: Headers = ()) -> None:
        length = (b"content-length", str(len(self.body)).encode())
        headers = [*self.headers, *extra, length]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error of the router's own, which clients get in the form of vLLM's errors of the endpoint.

    Attributes:
        reason: name of the reason, for programs. vLLM's errors have no such field.
    """

    status: int
    message: str
    reason: str
    headers: Headers = ()

    def reply(self, path: str) -> Reply:
        return Reply(self.status, (JSON_TYPE, *self.headers), json.dumps(self._content(path)).encode())

    def event(self, path: str) -> bytes:
        """Return a server-sent event, for the end of a stream that cannot be completed."""
        name, content = b"", self._content(path)
        if path == RESPONSES:
            # Clients require a number. The router does not count events, so it gives one that no event has.
            content = {"type": "error", "code": self.reason, "message": self.message, "param": None}
            content["sequence_number"] = -1
        if path == RESPONSES or _is_anthropic(path):
            # Clients of these two APIs ignore events without a name.
            name = b"event: error\n"
        return name + b"data: " + json.dumps(content).encode() + b"\n\n"

    def _content(self, path: str) -> dict[str, Any]:
        if _is_anthropic(path):
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message, "reason": self.reason}}
        kind = _TYPES.get(self.status) or HTTPStatus(self.status).phrase
        error = {"message": self.message, "type": kind, "param": None, "code": self.status}
        return {"error": {**error, "reason": self.reason}}


NO_DECODE_ENGINE = ApiError(503, "no decode engine can be reached", "engine_unavailable")


def _is_anthropic(path: str) -> bool:
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")
