"""Relay a stream of server-sent events unchanged. If the stream breaks, the client gets an error event."""

from __future__ import annotations

import asyncio

from starlette.types import Send

from kvferry.serving.router.replies import Headers, error_event
from kvferry.serving.router.upstream import BROKEN, EngineAnswer, describe_error, relayed

_ENDS = (b"\n\n", b"\r\n\r\n")
_DONE = (
    b"data: [DONE]",
    b"event: message_stop",
    b"event: response.completed",
    b"event: response.failed",
    b"event: response.incomplete",
)
"""Beginnings of last events: of completions, of ``/v1/messages`` and of ``/v1/responses``."""


class BrokenBeforeFirst(Exception):
    """Raised if an engine's stream ends before its first event. Another engine can then serve the request."""


def is_events(answer: EngineAnswer) -> bool:
    """Return whether an answer is a successful stream of server-sent events."""
    if answer.status != 200:
        return False
    kinds = (value for name, value in answer.headers if name.lower() == b"content-type")
    return next(kinds, b"").startswith(b"text/event-stream")


async def relay_events(answer: EngineAnswer, send: Send, extra: Headers) -> str | None:
    """Relay an engine's server-sent events to the client, each as soon as it has arrived as a whole.

    If the engine's stream breaks after the first event, the client gets an error event as the last event.

    Args:
        answer: answer of the engine, whose body was not read yet.
        send: ASGI function that sends to the client.
        extra: headers to add to those of the engine's answer.

    Returns:
        None if the stream was complete; otherwise a description of the failure.

    Raises:
        BrokenBeforeFirst: the engine's stream ended before anything was sent to the client.
    """
    held, begun, done, fault = b"", False, False, None
    try:
        async for chunk in answer.chunks():
            ready, held = _split(held + chunk)
            if not ready:
                continue
            if not begun:
                headers = [*relayed(answer.headers), *extra]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                begun = True
            done = done or any(end in ready for end in _DONE)
            await send({"type": "http.response.body", "body": ready, "more_body": True})
            # Relaying events that have already arrived never waits. Let a cancellation take effect here.
            await asyncio.sleep(0)
        if not done:
            fault = "the stream ended without its last event"
    except BROKEN as error:
        fault = None if done else describe_error(error)
    if not begun:
        raise BrokenBeforeFirst(fault)
    last = (
        held if done else error_event(f"the decode engine failed while answering: {fault}", "engine_failed")
    )
    await send({"type": "http.response.body", "body": last})
    return fault


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Split received bytes of an event stream after the last complete event.

    Args:
        data: bytes that begin at the start of an event.

    Returns:
        Bytes of all complete events, and bytes of the incomplete event after them.
    """
    cut = max(at + len(end) if (at := data.rfind(end)) >= 0 else 0 for end in _ENDS)
    return data[:cut], data[cut:]
