"""Probe the health of engines: in the background if they are down, and on demand."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import httpx

from kvferry.serving.router.backends import Backend
from kvferry.serving.router.hop import LOOP_DETECTED
from kvferry.serving.router.upstream import describe_error

_HEALTH_SECONDS = 3.0


async def probe(client: httpx.AsyncClient, backend: Backend) -> None:
    """Query an engine's ``/health``, and mark the engine as up or down by the status of the answer.

    An engine that does not answer is marked as down.

    Args:
        client: HTTP client for all engines.
        backend: engine to query.
    """
    try:
        with anyio.fail_after(_HEALTH_SECONDS):
            async with client.stream("GET", f"{backend.url}/health") as response:
                pass
    except httpx.TransportError as error:
        backend.mark_down(describe_error(error))
    except TimeoutError:
        backend.mark_down(f"/health does not answer in {_HEALTH_SECONDS:g} s")
    else:
        if response.status_code == 200:
            backend.mark_up()
        elif response.status_code == LOOP_DETECTED:
            backend.mark_down("it is this router itself, or a router that asks it")
        else:
            backend.mark_down(f"/health answers with status {response.status_code}")


async def probe_all(client: httpx.AsyncClient, backends: Sequence[Backend]) -> None:
    """Query ``/health`` of all these engines concurrently, and mark each engine as up or down."""
    async with anyio.create_task_group() as group:
        for backend in backends:
            group.start_soon(probe, client, backend)


async def watch_down(client: httpx.AsyncClient, backends: Sequence[Backend], seconds: float) -> None:
    """Periodically probe those engines that are marked as down, until this coroutine is cancelled.

    Args:
        client: HTTP client for all engines.
        backends: engines to watch.
        seconds: time between two probes, in seconds.
    """
    while True:
        await anyio.sleep(seconds)
        await probe_all(client, [backend for backend in backends if not backend.up])
