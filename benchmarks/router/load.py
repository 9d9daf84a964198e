"""Send completions to a router over connections that stay open, and read the answers to their end."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

from kvferry.common.errors import KVFerryError


class BadAnswer(KVFerryError):
    """Raised if a router answers a request of the load with an error."""


def request(prompt: str, *, stream: bool) -> bytes:
    """Return a completion request as HTTP/1.1.

    Args:
        prompt: text of the prompt.
        stream: whether the answer is a stream of events.
    """
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 64, "stream": stream}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body)
    )
    return head + body


async def run_load(url: str, raw: bytes, count: int, connections: int) -> None:
    """Send a request `count` times, `connections` at a time.

    Args:
        url: base URL of the router.
        raw: request, as `request` returns it.
        count: number of requests in all.
        connections: number of connections, each of which sends one request after the other.

    Raises:
        BadAnswer: an answer is not 200.
    """
    left = iter(range(count))

    async def one_connection() -> None:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            for _ in left:
                writer.write(raw)
                await _read_answer(reader)
        finally:
            writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(one_connection())


async def _read_answer(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise BadAnswer(f"the router answers {head.splitlines()[0].decode()}; see its log")
    if b"transfer-encoding: chunked" not in head:
        await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        return
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)
    await reader.readline()
