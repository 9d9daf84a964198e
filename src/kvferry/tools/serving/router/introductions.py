"""Connect decode engines to prefill engines before the first request of a client.

Engines connect with the first ticket between them, which costs its request some tenths of a second. So the
router itself hands a short prompt over between a prefill and a decode engine as soon as both are up, and
again after either was down.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import product

from kvferry.tools.serving.router.backends import Backend, Pool
from kvferry.tools.serving.router.bodies import COMPLETIONS, decode_body, kv_params_of, prefill_body
from kvferry.tools.serving.router.hop import Hop
from kvferry.tools.serving.router.keys import key_header
from kvferry.tools.serving.router.replies import Reply
from kvferry.tools.serving.router.settings import RouterSettings
from kvferry.tools.serving.router.streaming import new_ticket
from kvferry.tools.serving.router.upstream import BROKEN, EngineClient, read_whole

# Many engines that start at once are not flooded with hand-overs.
_AT_ONCE = 8

# Every engine can answer it: token ids that each model has, and no name of a model.
_GREETING = {"prompt": [0] * 8, "max_tokens": 1}


class Introductions:
    """Hand-overs of a short prompt between the engines of two pools, once after each start of either."""

    def __init__(
        self, settings: RouterSettings, prefill: Pool, decode: Pool, client: EngineClient, hop: Hop
    ) -> None:
        self._prefill, self._decode, self._client = prefill, decode, client
        self._seconds = settings.probe_seconds
        key = () if settings.engine_key is None else (key_header(settings.engine_key),)
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._headers = hop.passed_on((*key, (b"content-type", b"application/json")))

    async def run(self) -> None:
        """Introduce engines as they come up, until this coroutine is cancelled."""
        met = dict[tuple[Backend, Backend], tuple[int, ...]]()
        async with asyncio.TaskGroup() as group:
            while True:
                pairs = list(product(self._prefill.backends, self._decode.backends))
                met = {pair: runs for pair, runs in met.items() if pair in pairs}
                for pair in pairs:
                    # An engine that was down may have started again, and then knows its peers no more.
                    runs = tuple(backend.losses for backend in pair)
                    if all(backend.up for backend in pair) and met.get(pair) != runs:
                        met[pair] = runs
                        group.create_task(self._introduce_in_turn(*pair))
                await asyncio.sleep(self._seconds)

    async def _introduce_in_turn(self, prefill: Backend, decode: Backend) -> None:
        async with self._room:
            await self._introduce(prefill, decode)

    async def _introduce(self, prefill: Backend, decode: Backend) -> None:
        """Hand a prompt over from one engine to another. Engines that cannot do it are left alone."""
        name = new_ticket()
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
