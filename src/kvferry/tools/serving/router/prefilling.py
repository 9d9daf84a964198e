"""The prefill half of a completion: one prefill engine after the other, until one offers the prompt's KV."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from kvferry.tools.serving.router.backends import Backend, Pool, new_ticket
from kvferry.tools.serving.router.bodies import (
    COMPLETIONS,
    kv_params_of,
    prefill_body,
    prefill_headers,
    withdrawal_body,
    withdrawal_headers,
)
from kvferry.tools.serving.router.completion import Completion, Offer
from kvferry.tools.serving.router.failures import failure_of, is_busy, is_failure
from kvferry.tools.serving.router.fleet import probe
from kvferry.tools.serving.router.replies import Headers, Reply
from kvferry.tools.serving.router.upstream import (
    BROKEN,
    NOT_CONNECTED,
    EngineClient,
    describe_error,
    note_unreachable,
    read_whole,
)


class Prefilling:
    """Requests to prefill engines, and word to them about KV that is not wanted any more."""

    def __init__(self, pool: Pool, client: EngineClient, withdrawal_seconds: float) -> None:
        """Create it without requests. Engines are told after `withdrawal_seconds` which KV is unwanted."""
        self._pool, self._client, self._withdrawal_seconds = pool, client, withdrawal_seconds
        self._withdrawals: dict[Backend, asyncio.Task[None]] = {}

    async def kv_of_prompt(self, completion: Completion, tried: list[Backend]) -> Offer | None:
        """Have a prefill engine compute the prompt, and return the offer of its KV.

        Return None if no prefill engine offers KV, if one refuses the request, or if too many engines failed.
        In the first two cases the decode engine answers the request.

        Args:
            tried: prefill engines that have failed already. Further ones are added.
        """
        while not completion.failures.exhausted and (
            backend := self._pool.next(tried, completion.session, cached=completion.holders.tokens_of)
        ):
            tried.append(backend)
            reply = await self.prefilled(backend, completion, None)
            if reply is None:
                continue
            if reply.status != 200:
                return None  # the decode engine has the last word, in case that their settings differ
            params = kv_params_of(reply.body)
            if backend.note_hand_over(params) and params is not None:
                return Offer(backend, params)
            if params is not None and not params.get("remote_stopped"):
                return None  # it offers no KV of this prompt, and no other engine will
        return None

    async def prefilled(self, backend: Backend, completion: Completion, ticket: str | None) -> Reply | None:
        """Send a request to a prefill engine, and return the engine's answer.

        Return None in these cases:

        - The engine is unreachable. It is marked as down.
        - The engine is busy. It rests for a while.
        - The connection breaks later, or the engine is silent. The engine is marked as down, and the failure
          is added to the completion's.
        - The engine answers with a server error. This is added, too, and the engine rests.
        """
        call, failures, begun = completion.call, completion.failures, time.monotonic()
        # Known before the request is sent, because the engine may keep KV even if its answer is lost.
        completion.held[name := new_ticket()] = backend
        unwanted = backend.take_unwanted()
        body = prefill_body(completion.hinted(backend), ticket, name, unwanted)
        try:
            with backend.count_request():
                async with self._client.opened(
                    "POST", backend, call.path, prefill_headers(call.headers), body
                ) as response:
                    reply = await read_whole(response)
        except BROKEN as error:
            note_unreachable(backend, error)
            if not isinstance(error, NOT_CONNECTED):
                failures.add(backend, describe_error(error))
            return None
        if is_busy(reply.status) or is_failure(reply.status):
            backend.back_off()
            if is_failure(reply.status):
                failures.add(backend, failure_of(reply))
                await probe(self._client, backend)
            return None
        if reply.status != 200 or not (kv_params_of(reply.body) or {}).get("do_remote_prefill"):
            completion.held.pop(name, None)  # it keeps no KV
        backend.note_success()
        if reply.status == 200:
            call.record.prefill_seconds = time.monotonic() - begun
        else:
            completion.refusals.append((backend, failure_of(reply)))
            backend.unwanted.extend(unwanted)  # the API server has not told the engine
        return reply

    def withdraw(self, completion: Completion) -> None:
        """Note that nobody will read the KV that prefill engines may hold for a completion that has ended."""
        # The client has left, or the request failed before a decode engine answered. Without word of that,
        # the KV would fill the prefill engine until its lease expires.
        for name, backend in completion.held.items():
            backend.unwanted.append(name)
            if backend not in self._withdrawals:
                headers = withdrawal_headers(completion.call.headers)
                task = asyncio.create_task(self._withdraw(backend, headers, completion.body.get("model")))
                self._withdrawals[backend] = task

    async def _withdraw(self, backend: Backend, headers: Headers, model: Any) -> None:
        """Tell a prefill engine which KV is unwanted. If it cannot be reached or refuses, leases expire."""
        # The next prompt for this engine, if there is one by then, takes the names along at no cost.
        await asyncio.sleep(self._withdrawal_seconds)
        del self._withdrawals[backend]  # later names wait for another task
        if not backend.up or not (names := backend.take_unwanted()):
            return
        body = withdrawal_body(model, names)
        with suppress(*BROKEN):
            async with self._client.opened("POST", backend, COMPLETIONS, headers, body) as response:
                await read_whole(response)

    async def close(self) -> None:
        """Stop telling prefill engines which KV is unwanted."""
        for task in self._withdrawals.values():
            task.cancel()
        await asyncio.gather(*self._withdrawals.values(), return_exceptions=True)
