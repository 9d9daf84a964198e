"""Waits for an engine's next bytes, which end when the engine is silent.

The router waits for an engine when it connects, uploads, and reads an answer. None of these waits has a time
limit of its own, because a busy engine may rightly take long. An engine is silent if none of its probes has
succeeded for some time. Then each wait that has lasted as long ends.

Time is counted in the prober's ticks. Time in which the router itself could not run is so no silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SilentEngine(Exception):
    """Raised if an engine sent nothing and its probes failed for so long that the wait for it ends."""


class Waits:
    """The waits of all requests, and of the probe, for one engine."""

    def __init__(self) -> None:
        self._now, self._heard = 0, 0
        self._begun: dict[asyncio.Timeout, int] = {}

    def note_alive(self) -> None:
        self._heard = self._now

    def tick(self, limit: int) -> None:
        """Advance the time, and end waits of `limit` ticks or more if the engine was silent for as long."""
        self._now += 1
        if self._now - self._heard < limit:
            return
        for wait, begun in [*self._begun.items()]:
            if self._now - begun >= limit:
                del self._begun[wait]
                wait.reschedule(0.0)  # in the past, so that it ends now

    @asynccontextmanager
    async def wait(self) -> AsyncIterator[None]:
        """Wait for the engine's next bytes in the ``with`` block.

        Raises:
            SilentEngine: the engine is silent.
        """
        wait = asyncio.timeout(None)
        self._begun[wait] = self._now
        try:
            async with wait:
                yield
        except TimeoutError:
            if not wait.expired():
                raise
            raise SilentEngine from None
        finally:
            self._begun.pop(wait, None)
