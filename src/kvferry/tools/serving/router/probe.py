"""Probe the health of all engines in the background."""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Callable, Iterable
from functools import partial

from kvferry.tools.serving.router.backends import Backend, Pool
from kvferry.tools.serving.router.hop import LOOP_DETECTED, LOOP_REASON
from kvferry.tools.serving.router.settings import RouterSettings
from kvferry.tools.serving.router.upstream import BROKEN, EngineClient, is_own_fault, note_unreachable

_FIRST_PROBES_SECONDS = 0.5


async def probe(client: EngineClient, backend: Backend) -> None:
    """Query an engine's ``/health``, and mark the engine as up or down by the answer, or by its lack."""
    try:
        async with client.opened("GET", backend, "/health") as answer:
            status = answer.status
    except BROKEN as error:
        note_unreachable(backend, error)
        # A server that stops refuses connections while it completes its answers; if it dies, they break.
        if is_own_fault(error) or getattr(error, "errno", None) == errno.ECONNREFUSED:
            backend.waits.note_alive()
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
        self._client, self._backends, self._settings = client, backends, settings
        self._silent_ticks = math.ceil(settings.silent_seconds / settings.probe_seconds)
        self._running: dict[Backend, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            while True:
                self.tick()
                await asyncio.sleep(self._settings.probe_seconds)
        finally:
            for task in self._running.values():
                task.cancel()

    def tick(self) -> None:
        """Begin the next probe of every engine, and end the waits for engines that are silent."""
        for backend in self._backends():
            backend.waits.tick(self._silent_ticks)
            if backend not in self._running:
                self._running[backend] = task = asyncio.create_task(probe(self._client, backend))
                task.add_done_callback(partial(self._ended, backend))

    def _ended(self, backend: Backend, _: asyncio.Task[None]) -> None:
        del self._running[backend]

    async def first_probes(self) -> None:
        """Wait until every engine was probed once, but at most half a second."""
        new = [task for backend, task in self._running.items() if not backend.probed]
        if new:
            await asyncio.wait(new, timeout=_FIRST_PROBES_SECONDS)

    async def until_up(self, pool: Pool) -> None:
        """Wait until an engine of a pool is up, or until each has been probed."""
        while not any(backend.up for backend in pool.backends):
            first = [self._running.get(backend) for backend in pool.backends if not backend.probed]
            pending = [task for task in first if task is not None]
            if not pending:
                return
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
