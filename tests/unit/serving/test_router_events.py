"""Streams of events on their way through the router."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import httpx

from kvferry.serving.router.events import relay_events


class Burst(httpx.AsyncByteStream):
    """Many events that are here already: nothing waits for the next one."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
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
            await relay_events(httpx.Response(200, stream=Burst()), send, ())

    anyio.run(relayed)
    assert sent == [b"", b"data: 0\n\n"]
