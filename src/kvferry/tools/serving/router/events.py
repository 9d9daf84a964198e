"""Relay a stream of server-sent events unchanged. If the stream breaks, the client gets an error event."""

from __future__ import annotations

import asyncio

from starlette.types import Send

from kvferry.tools.serving.router.replies import ApiError, Headers
from kvferry.tools.serving.router.upstream import (
    BROKEN,
    BrokenBeforeFirst,
    EngineAnswer,
    describe_error,
    relayed,
)

_ENDS = (b"\n\n", b"\r\n\r\n")
# Lines of last events: of completions, of ``/v1/messages`` (two) and of ``/v1/responses``. JSON has no line
# feed inside a text, so no text looks like one of these lines.
_DONE = (
    b"\ndata: [DONE]",
    b"\nevent: message_stop",
    b"\nevent: error",
    b"\nevent: response.completed",
    b"\nevent: response.failed",
    b"\nevent: response.incomplete",
)

# An engine that never ends an event must not fill the router's memory.
_MAX_EVENT_MIB = 16


def is_events(answer: EngineAnswer) -> bool:
    """Return whether an answer is a successful stream of server-sent events."""
    if answer.status != 200:
        return False
    kinds = (value for name, value in answer.headers if name.lower() == b"content-type")
    return next(kinds, b"").startswith(b"text/event-stream")


class ReceivedEvents:
    """The bytes of an event stream that have arrived, split into complete events and the rest.

    Attributes:
        done: True once the last event of a complete answer has arrived.
    """

    def __init__(self) -> None:
        self.done = False
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._tail = b""

    def add(self, chunk: bytes) -> bytes:
        """Add bytes, and return those of all events that are now complete."""
        seen = self._tail + chunk  # the end of an event may begin in the three bytes before
        cut = max(at + len(end) if (at := seen.rfind(end)) >= 0 else 0 for end in _ENDS)
        if not cut:
            # Pieces are joined only once, so the work grows with their bytes, not with the event's square.
            self._held.append(chunk)
            self._held_bytes += len(chunk)
            self._tail = seen[-3:]
            return b""
        cut -= len(self._tail)
        ready, rest = b"".join((*self._held, chunk[:cut])), chunk[cut:]
        self._held, self._held_bytes, self._tail = [rest], len(rest), rest[-3:]
        lines = b"\n" + ready
        self.done = self.done or any(line in lines for line in _DONE)
        return ready

    @property
    def too_long(self) -> bool:
        return self._held_bytes > _MAX_EVENT_MIB << 20

    @property
    def rest(self) -> bytes:
        return b"".join(self._held)


async def relay_events(answer: EngineAnswer, send: Send, extra: Headers, path: str) -> str | None:
    """Relay an engine's server-sent events to the client, each as soon as it has arrived as a whole.

    If the engine's stream breaks after the first event, or an event is too long, the client gets an error
    event as the last event.

    Args:
        extra: headers to add to those of the engine's answer.
        path: path of the endpoint, which decides on the form of the error event.

    Returns:
        None if the stream was complete; otherwise a description of the failure.

    Raises:
        BrokenBeforeFirst: the engine's stream ended before anything was sent to the client.
    """
    received, begun, fault = ReceivedEvents(), False, None
    try:
        async for chunk in answer.chunks():
            if not (ready := received.add(chunk)):
                if received.too_long:
                    break
                continue
            if not begun:
                headers = [*relayed(answer.headers), *extra]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                begun = True
            await send({"type": "http.response.body", "body": ready, "more_body": True})
            # Relaying events that have already arrived never waits. Let a cancellation take effect here.
            await asyncio.sleep(0)
        if received.too_long:
            fault = f"it sent an event of more than {_MAX_EVENT_MIB} MiB"
        elif not received.done:
            fault = "its stream ended without the last event"
    except BROKEN as error:
        # A connection that breaks after the last event has cost the client nothing.
        fault = None if received.done else describe_error(error)
    if not begun:
        raise BrokenBeforeFirst(fault)
    last = received.rest
    if not received.done:
        message = f"the decode engine failed while answering: {fault}"
        last = ApiError(500, message, "engine_failed").event(path)
    await send({"type": "http.response.body", "body": last})
    return fault
