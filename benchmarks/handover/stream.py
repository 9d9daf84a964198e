"""HTTP clients that stream answers from servers of this machine, and note when each token arrives."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from kvferry.common.errors import TransferError

_DATA, _DONE = b"data: ", b"[DONE]"


async def post_stream(port: int, path: str, body: bytes) -> list[tuple[float, list[int]]]:
    """Send a request whose answer is a stream of events; return (arrival, token ids) of those with tokens.

    Args:
        port: TCP port of the server.
        path: path of the URL.
        body: JSON body of the request.

    Raises:
        TransferError: the server refused the request, or its stream has an error.
    """
    found = []
    async with aclosing(_lines(port, path, body)) as lines:
        async for line in lines:
            if not line.startswith(_DATA) or line.startswith(_DATA + _DONE):
                continue
            arrived, event = time.perf_counter(), json.loads(line[len(_DATA) :])
            if "choices" not in event:
                raise TransferError(f"the stream of {path} has an error: {line[:300].decode()}")
            if event["choices"] and (tokens := event["choices"][0].get("token_ids")):
                found.append((arrived, tokens))
    return found


async def post(port: int, path: str, body: bytes) -> bytes:
    """Send a request, and return the body of the answer.

    Raises:
        TransferError: the server refused the request.
    """
    async with aclosing(_pieces(port, path, body)) as pieces:
        return b"".join([piece async for piece in pieces])


async def _lines(port: int, path: str, body: bytes) -> AsyncGenerator[bytes]:
    """Send a request, and yield the lines of the answer's body as they arrive."""
    rest = b""
    async with aclosing(_pieces(port, path, body)) as pieces:
        async for piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line
    yield rest


async def _pieces(port: int, path: str, body: bytes) -> AsyncGenerator[bytes]:
    """Send a request on a new connection, and yield the answer's body in pieces."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        raise TransferError(f"the request to {path} failed: {error}") from error
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: server\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200" not in (status := answer.split(b"\r\n", 1)[0]):
            said = (await reader.read(300)).decode(errors="replace")
            raise TransferError(f"the request to {path} was answered with {status.decode()}: {said}")
        if b"transfer-encoding: chunked" not in answer:
            yield await reader.read(-1)
            return
        while size := int(await reader.readline(), 16):
            yield await reader.readexactly(size)
            await reader.readline()
    except (OSError, asyncio.IncompleteReadError) as error:
        why = str(error) or type(error).__name__
        raise TransferError(f"the request to {path} failed: {why}") from error
    finally:
        writer.close()


def serve_all(
    jobs: Sequence[Any], clients: int, serve: Callable[[Any], Awaitable[Any]], patience_seconds: float
) -> list[Any]:
    """Serve jobs with a number of clients, each of which takes the next job when it is done with one.

    Args:
        jobs: jobs, in the order in which clients take them.
        clients: number of clients.
        serve: coroutine function that serves a job, and returns its result.
        patience_seconds: longest time until the last result, in seconds.

    Returns:
        The results, in the order of the jobs.

    Raises:
        TransferError: a job failed, or there was no result in time.
    """
    results: dict[int, Any] = {}
    left = iter(enumerate(jobs))

    async def client() -> None:
        for number, job in left:
            results[number] = await serve(job)

    async def run() -> None:
        async with asyncio.timeout(patience_seconds), asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())

    try:
        asyncio.run(run())
    except TimeoutError as error:
        raise TransferError(f"no answer to a mix within {patience_seconds:g} s") from error
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [results[number] for number in range(len(jobs))]
