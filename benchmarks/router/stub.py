"""An HTTP engine that answers at once. Only the router before it is measured.

    python -m benchmarks.router.stub FD EVENTS

FD is the number of an inherited listening socket, EVENTS the number of events of a stream.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from typing import cast

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_OFFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "stub",
    "remote_block_ids": [[1]],
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}
_USAGE = {"prompt_tokens": 1000, "completion_tokens": 1, "total_tokens": 1001}


def _answer(value: object) -> bytes:
    body = json.dumps(value).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


def _event(data: bytes) -> bytes:
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


_CHOICE = {"index": 0, "text": " a", "finish_reason": "length"}
_COMPLETION = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
_PREFILLED = _answer({**_COMPLETION, "choices": [_CHOICE], "usage": _USAGE, "kv_transfer_params": _OFFER})
_DECODED = _answer({**_COMPLETION, "choices": [{**_CHOICE, "text": " a" * 64}], "usage": _USAGE})
_MODELS = _answer({"object": "list", "data": [{"id": "m", "object": "model"}]})
_TOKEN = _event(json.dumps({**_COMPLETION, "choices": [{**_CHOICE, "finish_reason": None}]}).encode())
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class _Connection(asyncio.Protocol):
    """One connection of a router: answers its requests in turn."""

    def __init__(self, events: int) -> None:
        self._events = events
        self._received = b""
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._received, 0, end)
            size = end + 4 + (int(length[1]) if length else 0)
            if len(self._received) < size:
                return
            request, self._received = self._received[:size], self._received[size:]
            self._serve(request)

    def _serve(self, request: bytes) -> None:
        if request.startswith(b"GET"):
            self._transport.write(_MODELS)
        elif re.search(rb'"do_remote_decode": ?true', request):
            self._transport.write(_PREFILLED)
        elif re.search(rb'"stream": ?true', request):
            self._transport.write(_STREAM)
            self._write_event(0)
        else:
            self._transport.write(_DECODED)

    def _write_event(self, number: int) -> None:
        if self._transport.is_closing():
            return
        if number == self._events:
            self._transport.write(_event(b"[DONE]") + b"0\r\n\r\n")
            return
        self._transport.write(_TOKEN)
        # As an engine does: each event is sent by itself.
        asyncio.get_running_loop().call_later(_EVENT_SECONDS, self._write_event, number + 1)


_EVENT_SECONDS = 0.005


async def _serve(listening: socket.socket, events: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(events), sock=listening)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
