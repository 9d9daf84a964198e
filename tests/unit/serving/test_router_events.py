"""Streams of events on their way through the router."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import aiohttp
import anyio
import pytest
from hypothesis import given, strategies as st

from kvferry.tools.serving.router.events import (
    ReceivedEvents,
    RelayedStream,
    end_broken,
    is_events,
    relay_events,
)
from kvferry.tools.serving.router.upstream import BrokenStream


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
            await relay_events(Burst(), send, (), RelayedStream())

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


def relayed(*chunks: bytes, path: str = "/v1/completions") -> tuple[str | None, list[bytes]]:
    """What is said to be wrong with a stream of these chunks that breaks, and what the caller gets of it."""
    sent: list[bytes] = []

    async def send(message) -> None:
        sent.append(message.get("body", b""))

    return anyio.run(ended, Breaking(*chunks), send, path), sent[1:]


async def ended(answer: Answer, send, path: str) -> str | None:
    """Relay a stream, and end it with an error if it breaks."""
    try:
        await relay_events(answer, send, (), RelayedStream())
    except BrokenStream as error:
        await end_broken(send, path, str(error))
        return str(error)
    return None


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_an_event_ends_with_either_kind_of_empty_line(end) -> None:
    fault, (first, last) = relayed(b"data: 1" + end + b"da")
    assert fault == "it closed the connection in the middle of its answer"
    assert first == b"data: 1" + end
    assert b"engine_failed" in last


def test_an_engine_that_breaks_the_connection_after_its_last_event_is_at_no_fault() -> None:
    assert relayed(b"data: [DONE]\n\n: bye") == (None, [b"data: [DONE]\n\n", b": bye"])


def test_a_text_about_the_last_event_is_not_the_last_event() -> None:
    fault, (_, last) = relayed(b'data: {"text": "data: [DONE] event: error"}\n\n')
    assert fault == "it closed the connection in the middle of its answer"
    assert b"engine_failed" in last


def test_an_error_of_the_engine_is_the_last_event_of_messages() -> None:
    event = b'event: error\ndata: {"type": "error"}\n\n'
    assert relayed(event, path="/v1/messages") == (None, [event, b""])


def test_a_broken_answer_to_messages_ends_with_an_event_that_anthropics_clients_read() -> None:
    _, (_, last) = relayed(b"event: message_start\ndata: {}\n\n", path="/v1/messages")
    name, data, *rest = last.split(b"\n")
    assert (name, rest) == (b"event: error", [b"", b""])
    error = json.loads(data.removeprefix(b"data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")


class Endless(Answer):
    """An event, and another one that is very long; counts what is taken of it."""

    taken = 0

    async def chunks(self) -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        for _ in range(100):
            self.taken += 1
            yield bytes(1 << 20)


def test_an_event_without_an_end_is_given_up_before_it_fills_the_memory() -> None:
    sent: list[bytes] = []

    async def send(message) -> None:
        sent.append(message.get("body", b""))

    fault = anyio.run(ended, answer := Endless(), send, "/v1/completions")
    assert (fault, answer.taken) == ("it sent an event of more than 16 MiB", 17)
    assert sent[1] == b"data: 1\n\n"
    assert b"engine_failed" in sent[2]


@pytest.mark.parametrize("size", range(1, 8))
def test_end_of_an_event_is_found_at_any_cut_of_the_bytes(size) -> None:
    whole, received = b"a\n\nb\n\nc\r\n\r\nd\r\n\r\ne", ReceivedEvents()
    sent = b"".join(received.add(whole[at : at + size]) for at in range(0, len(whole), size))
    assert (sent, received.rest) == (whole[:-1], b"e")


@given(st.lists(st.sampled_from((b"\n", b"\r\n", b"\r", b"a", b"data: [DONE]", b"bc"))), st.data())
def test_events_do_not_depend_on_how_the_bytes_arrive(pieces, data) -> None:
    whole = b"".join(pieces)
    received, sent = ReceivedEvents(), b""
    left = whole
    while left:
        size = data.draw(st.integers(1, len(left)))
        sent, left = sent + received.add(left[:size]), left[size:]
        assert sent + received.rest + left == whole
        assert not any(end in received.rest for end in (b"\n\n", b"\r\n\r\n"))
        assert received.done == (b"\ndata: [DONE]" in b"\n" + sent)


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
