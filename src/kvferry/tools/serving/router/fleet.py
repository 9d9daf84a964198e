"""Background tasks about a router's engines: reading the file that lists them, introductions and probes.

The file has one engine per line: its role (prefill, decode or both) and its URL. Empty lines and lines that
begin with ``#`` are skipped.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

from kvferry.common.errors import ConfigError
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.backends import Backend, Engines, Pool, new_ticket
from kvferry.tools.serving.router.bodies import COMPLETIONS, decode_body, kv_params_of, prefill_body
from kvferry.tools.serving.router.replies import Reply
from kvferry.tools.serving.router.settings import RouterSettings, engine_url, key_header, read_text
from kvferry.tools.serving.router.upstream import (
    BROKEN,
    LOOP_DETECTED,
    LOOP_REASON,
    EngineClient,
    Hop,
    is_own_fault,
    note_unreachable,
    read_whole,
)

_log = logging.getLogger("kvferry.router")

_ROLES = {Role.PREFILL: ("prefill",), Role.DECODE: ("decode",), Role.BOTH: ("prefill", "decode")}
_EXAMPLE = "write one engine per line, such as: decode http://host:port"
# Many engines that start at once are not flooded with hand-overs.
_AT_ONCE = 8
# Every engine can answer it: token ids that each model has, and no name of a model.
_GREETING = {"prompt": [0] * 8, "max_tokens": 1}
_FIRST_PROBES_SECONDS = 0.5


def read_engines(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the base URLs in a file of engines that prefill and that decode, at least one of each.

    An engine that does both is in both lists.

    Raises:
        ConfigError: the file cannot be read, a line is not a role and a URL, or a role has no engine.
    """
    found: dict[str, dict[str, None]] = {"prefill": {}, "decode": {}}
    for number, line in enumerate(read_text(path, "engines", _EXAMPLE).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        url = engine_url(words[-1])
        if len(words) != 2 or words[0] not in _ROLES or url is None:
            raise ConfigError(f"line {number} of {path} is {line.strip()!r}; {_EXAMPLE}")
        for task in _ROLES[Role(words[0])]:
            found[task][url] = None
    for role, urls in found.items():
        if not urls:
            raise ConfigError(f"{path} has no {role} engine; {_EXAMPLE}")
    return {role: tuple(urls) for role, urls in found.items()}


async def watch_engines(path: Path, engines: Engines, seconds: float) -> None:
    """Replace the engines by those of a file whenever it changes. Look every `seconds`."""
    said = ""
    while True:
        await asyncio.sleep(seconds)
        try:
            urls = await asyncio.to_thread(read_engines, path)
        # Someone may be writing the file: keep the engines, and say why once.
        except ConfigError as error:
            if str(error) != said:
                _log.warning("the router keeps its engines: %s", error)
            said = str(error)
        else:
            said = ""
            engines.replace(**urls)


class Introductions:
    """Hand-overs of a short prompt between prefill and decode engines, once after each start of either."""

    def __init__(self, settings: RouterSettings, engines: Engines, client: EngineClient, hop: Hop) -> None:
        self._engines, self._client = engines, client
        self._seconds = settings.probe_seconds
        key = () if settings.engine_key is None else (key_header(settings.engine_key),)
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._headers = hop.passed_on((*key, (b"content-type", b"application/json")))

    async def run(self) -> None:
        """Introduce engines as they come up, until this coroutine is cancelled."""
        # How often each engine had been lost when the two met.
        met = dict[tuple[Backend, Backend], tuple[int, ...]]()
        async with asyncio.TaskGroup() as group:
            while True:
                every = product(self._engines.prefill.backends, self._engines.decode.backends)
                pairs = [pair for pair in every if pair[0] is not pair[1]]
                met = {pair: runs for pair, runs in met.items() if pair in pairs}
                for pair in pairs:
                    # An engine that was down may have started again, and then knows its peers no more.
                    runs = tuple(backend.losses for backend in pair)
                    if all(backend.up for backend in pair) and met.get(pair) != runs:
                        met[pair] = runs
                        group.create_task(self._introduce(*pair))
                await asyncio.sleep(self._seconds)

    async def _introduce(self, prefill: Backend, decode: Backend) -> None:
        """Hand a prompt over from one engine to another. Engines that cannot do it are left alone."""
        name = new_ticket()
        async with self._room:
            with suppress(*BROKEN):
                reply = await self._ask(prefill, prefill_body(_GREETING, name=name))
                if reply.status != 200 or not prefill.note_hand_over(params := kv_params_of(reply.body)):
                    return
                reply = await self._ask(decode, decode_body(_GREETING, params))
                if reply.status == 200:
                    return
        # No decode engine has read this KV, and none will.
        prefill.unwanted.append(name)

    async def _ask(self, backend: Backend, body: bytes) -> Reply:
        async with self._client.opened("POST", backend, COMPLETIONS, self._headers, body) as response:
            return await read_whole(response)


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

    def __init__(self, client: EngineClient, engines: Engines, settings: RouterSettings) -> None:
        self._client, self._engines, self._settings = client, engines, settings
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
        for backend in self._engines.known:
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
