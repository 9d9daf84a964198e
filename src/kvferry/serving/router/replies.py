"""Complete HTTP answers, and errors in OpenAI's format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `kvferry doctor` builds requests as the router does, and works without Starlette
    from starlette.types import Send

Headers = tuple[tuple[bytes, bytes], ...]
MESSAGES = "/v1/messages"
"""Path of Anthropic's endpoint."""
RESPONSES = "/v1/responses"
"""Path of OpenAI's endpoint for responses."""
JSON_TYPE = (b"content-type", b"application/json")
NO_RETRY = (b"x-should-retry", b"false")
"""Header that tells OpenAI's clients not to repeat the request, as they would do after a 5xx status."""

RETRY_LATER = (b"retry-after", b"10")
"""Header that asks the client to repeat the request when an engine may have been started again."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete HTTP answer.

    Attributes:
        status: HTTP status.
        headers: headers of the answer, without content-length, which `send` adds.
        body: complete body.
    """

    status: int
    headers: Headers
    body: bytes

    async def send(self, send: Send, extra: Headers = ()) -> None:
        """Send the answer to the client.

        Args:
            send: ASGI function that sends to the client.
            extra: headers to add to the answer.
        """
        length = (b"content-length", str(len(self.body)).encode())
        headers = [*self.headers, *extra, length]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def error_body(message: str, kind: str, code: str) -> bytes:
    """Return an OpenAI error object as JSON.

    Args:
        message: text of the error.
        kind: value of the error's ``type``.
        code: value of the error's ``code``.
    """
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error}).encode()


def bad_request(message: str, code: str = "invalid_request", status: int = 400) -> Reply:
    """Return an error reply for a mistake of the client.

    Args:
        message: text of the error.
        code: value of the error's ``code``.
        status: HTTP status.
    """
    return Reply(status, (JSON_TYPE,), error_body(message, "invalid_request_error", code))


def unauthorized() -> Reply:
    """Return an error reply for a request without a valid API key."""
    body = error_body("the API key is missing or wrong", "invalid_request_error", "invalid_api_key")
    return Reply(401, (JSON_TYPE, (b"www-authenticate", b"Bearer")), body)


def unavailable(message: str, code: str = "engine_unavailable", status: int = 503) -> Reply:
    """Return an error reply for a failure of the engines or the router.

    Args:
        message: text of the error.
        code: value of the error's ``code``.
        status: HTTP status.
    """
    return Reply(status, (JSON_TYPE,), error_body(message, "server_error", code))


def error_event(message: str, code: str, path: str) -> bytes:
    """Return an error as a server-sent event, for the end of a stream that cannot be completed.

    The event has the form of the endpoint's API: clients of Anthropic's messages and of OpenAI's responses
    ignore events without a name.

    Args:
        message: text of the error.
        code: value of the error's ``code``.
        path: path of the endpoint.
    """
    if path == MESSAGES:
        error = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
    if path == RESPONSES:
        # Clients require a number. The router does not count events, so it gives one that no event has.
        numbered = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": -1}
        return b"event: error\ndata: " + json.dumps(numbered).encode() + b"\n\n"
    return b"data: " + error_body(message, "server_error", code) + b"\n\n"
