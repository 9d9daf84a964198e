"""Probe the health of all engines in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from kvferry.serving.router.backends import Backend
from kvferry.serving.router.hop import LOOP_DETECTED, LOOP_REASON
from kvferry.serving.router.settings import RouterSettings
from kvferry.serving.router.upstream import BROKEN, EngineClient, note_unreachable

_FIRST_PROBES_SECONDS = 0.5


async def probe(client: EngineClient, backend: Backend, seconds: float) -> None:
    """Query an engine's ``/health``, and mark the engine as up or down by the status of the answer.

    An engine that does not answer is marked as down.

    Args:
        client: HTTP client for all engines.
        backend: engine to query.
        seconds: longest time to wait for the answer.
    """
    try:
        async with (
            asyncio.timeout(seconds),
            client.opened("GET", f"{backend.url}/health") as answer,
        ):
            status = answer.status
    except BROKEN as error:
        note_unreachable(backend, error)
    except TimeoutError:
        backend.mark_down(f"/health does not answer in {seconds:g} s")
    else:
        if status == 200:
            backend.mark_up()
        elif status == LOOP_DETECTED:
            backend.mark_down(LOOP_REASON)
        else:
            backend.mark_down(f"/health answers with status {status}")
    backend.probed = True


class Prober:
    """Background probes of all engines. An engine that hangs delays no probe of another one."""

    def __init__(
        self, client: EngineClient, backends: Callable[[], Iterable[Backend]], settings: RouterSettings
    ) -> None:
        """Store what to probe. `run` starts probing.

        Args:
            client: HTTP client for all engines.
            backends: function that returns the engines to probe.
            settings: settings of the router, with the times of probes.
        """
        self._client, self._backends, self._settings = client, backends, settings
        self._running: dict[Backend, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Probe every engine at once and then periodically, until this coroutine is cancelled."""
        try:
            while True:
                for backend in self._backends():
                    if backend not in self._running:
                        task = asyncio.create_task(
                            probe(self._client, backend, self._settings.health_seconds)
                        )
                        self._running[backend] = task
                        task.add_done_callback(partial(self._ended, backend))
                await asyncio.sleep(self._settings.probe_seconds)
        finally:
            for task in self._running.values():
                task.cancel()

    def _ended(self, backend: Backend, _: asyncio.Task[None]) -> None:
        del self._running[backend]

    async def first_probes(self) -> None:
        """Wait until every engine was probed once, but at most half a second."""
        new = [task for backend, task in self._running.items() if not backend.probed]
        if new:
            await asyncio.wait(new, timeout=_FIRST_PROBES_SECONDS)
