"""Streams of events on their way through the router."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import anyio
import pytest

from kvferry.serving.router.events import is_events, relay_events


class Answer:
    """An engine's answer with this status and type, whose body a subclass yields."""

    def __init__(self, status: int = 200, kind: bytes = b"text/event-stream") -> None:
        self.status, self.headers = status, ((b"Content-Type", kind),)

    async def chunks(self) -> AsyncIterator[bytes]:
        return
        yield b""


class Burst(Answer):
    """Many events that are here already: nothing waits for the next one."""

    async def chunks(self) -> AsyncIterator[bytes]:
        for number in range(100):
            yield b"data: %d\n\n" % number


def test_a_burst_of_events_ends_with_its_caller() -> None:
    """Else each event is written to a closed connection, and asyncio logs a warning for it."""
    sent: list[bytes] = []

    async def relayed() -> None:
        async def send(message) -> None:
            sent.append(message.get("body", b""))
            if sent[-1]:
                scope.cancel()  # what the router does when the caller has left

        with anyio.CancelScope() as scope:
            await relay_events(Burst(), send, ())

    anyio.run(relayed)
    assert sent == [b"", b"data: 0\n\n"]


class Breaking(Answer):
    """These chunks, and then a connection that breaks."""

    def __init__(self, *chunks: bytes) -> None:
        super().__init__()
        self.pieces = chunks

    async def chunks(self) -> AsyncIterator[bytes]:
        for chunk in self.pieces:
            yield chunk
        raise aiohttp.ClientPayloadError("reset")


def relayed(*chunks: bytes) -> tuple[str | None, list[bytes]]:
    """What is said to be wrong with a stream of these chunks that breaks, and what the caller gets of it."""
    sent: list[bytes] = []

    async def send(message) -> None:
        sent.append(message.get("body", b""))

    async def relay() -> str | None:
        return await relay_events(Breaking(*chunks), send, ())

    return anyio.run(relay), sent[1:]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_an_event_ends_with_either_kind_of_empty_line(end) -> None:
    fault, (first, last) = relayed(b"data: 1" + end + b"da")
    assert fault == "ClientPayloadError: reset"
    assert first == b"data: 1" + end
    assert b"engine_failed" in last


def test_an_engine_that_breaks_the_connection_after_its_last_event_is_at_no_fault() -> None:
    assert relayed(b"data: [DONE]\n\n: bye") == (None, [b"data: [DONE]\n\n", b": bye"])


@pytest.mark.parametrize(
    ("status", "kind", "are"),
    [
        (200, b"text/event-stream; charset=utf-8", True),
        (500, b"text/event-stream", False),
        (200, b"text/html", False),
    ],
)
def test_events_have_their_type_and_are_no_error(status, kind, are) -> None:
    assert is_events(Answer(status, kind)) is are
