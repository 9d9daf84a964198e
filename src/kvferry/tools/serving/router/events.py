"""Relay a stream of server-sent events, and end it with an error event if it breaks."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Send

from kvferry.tools.serving.router.replies import ApiError, Headers
from kvferry.tools.serving.router.upstream import (
    BROKEN,
    BrokenStream,
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


class EngineGaveUp(BrokenStream):
    """Raised if an engine says in a stream that it does not complete the answer.

    Attributes:
        before: events before that, for the client.
    """

    def __init__(self, before: bytes, reason: str) -> None:
        super().__init__(reason)
        self.before = before


class RelayedStream:
    """A stream of events to a client.

    Attributes:
        begun: True once the client has got data.
    """

    def __init__(self) -> None:
        self.begun = False

    def asks(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the request to a decode engine, for a request with this body."""
        return body

    def take(self, events: bytes) -> bytes:
        """Return the bytes for the client, from those of the engine's next events.

        Raises:
            EngineGaveUp: the engine does not complete the answer.
        """
        return events


async def relay_events(answer: EngineAnswer, send: Send, extra: Headers, stream: RelayedStream) -> None:
    """Relay an engine's server-sent events to the client, each as soon as it has arrived as a whole.

    Args:
        extra: headers to add to those of the engine's answer.
        stream: stream that the client gets, which may have begun.

    Raises:
        BrokenStream: the engine's stream broke, or an event is too long. The client has got whole events, and
            not the end of the stream.
        EngineGaveUp: the same, and the engine has said so.
    """
    received, fault = ReceivedEvents(), None
    try:
        async for chunk in answer.chunks():
            if ready := received.add(chunk):
                await _relay(stream.take(ready), answer, send, extra, stream)
            elif received.too_long:
                break
    except EngineGaveUp as error:
        await _relay(error.before, answer, send, extra, stream)
        raise
    except BROKEN as error:
        fault = describe_error(error)
    # A connection that breaks after the last event has cost the client nothing.
    if not received.done:
        if received.too_long:
            fault = f"it sent an event of more than {_MAX_EVENT_MIB} MiB"
        raise BrokenStream(fault or "its stream ended without the last event")
    await send({"type": "http.response.body", "body": received.rest})


async def _relay(
    events: bytes, answer: EngineAnswer, send: Send, extra: Headers, stream: RelayedStream
) -> None:
    if not events:
        return
    if not stream.begun:
        headers = [*relayed(answer.headers), *extra]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        stream.begun = True
    await send({"type": "http.response.body", "body": events, "more_body": True})
    # Relaying events that have already arrived never waits. Let a cancellation take effect here.
    await asyncio.sleep(0)


async def end_broken(send: Send, path: str, fault: str) -> None:
    """End a stream that cannot be completed with an error event. The path decides on the event's form."""
    message = f"the decode engine failed while answering: {fault}"
    await send({"type": "http.response.body", "body": ApiError(500, message, "engine_failed").event(path)})
