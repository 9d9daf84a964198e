"""Serve one completion: prefill on one engine, decode on another, and retries after failures.

    prefill engine ── kv_transfer_params ──→ decode engine ──→ client
         │ dead, silent, busy, or no kv_transfer_params
         └→ the next prefill engine; without one, the decode engine computes the prompt

If a prefill engine refuses the request, the decode engine answers it alone.

If a long prompt finds an idle prefill engine that can hand over KV while it computes, both engines are asked
at once (`streaming`). If the prefill engine then fails before the client got any data, the decode engine's
request is cancelled, and the next prefill engine is asked as above.

The request itself may make an engine fail. After a failure it is therefore retried on only one further engine
(`failures`).

Cancelling the task that runs `complete` closes the connection to the engine, which then aborts the request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio

from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.backends import Backend, Engines, StreamSource, new_ticket
from kvferry.tools.serving.router.bodies import decodes_alone, kv_params_of
from kvferry.tools.serving.router.completion import Completion, Offer
from kvferry.tools.serving.router.continuation import Transcript, may_continue
from kvferry.tools.serving.router.decoding import Decoding
from kvferry.tools.serving.router.failures import Suspects
from kvferry.tools.serving.router.metrics import AloneReason
from kvferry.tools.serving.router.prefilling import Prefilling
from kvferry.tools.serving.router.prefixes import LEAST_TOKENS, Prefixes, PrefixHolders
from kvferry.tools.serving.router.prompts import estimated_tokens, has_media
from kvferry.tools.serving.router.replies import RESPONSES
from kvferry.tools.serving.router.settings import RouterSettings
from kvferry.tools.serving.router.upstream import EngineClient


class CompletionFlow:
    """Handler of completion requests."""

    def __init__(
        self, settings: RouterSettings, engines: Engines, client: EngineClient, prefixes: Prefixes
    ) -> None:
        self._settings, self._prefill, self._decode = settings, engines.prefill, engines.decode
        self._prefixes = prefixes
        self._suspects = Suspects(settings.clock)
        self._prefilling = Prefilling(engines.prefill, client, settings.probe_seconds)
        self._decoding = Decoding(settings, engines.decode, client, self._prefilling)

    async def complete(self, completion: Completion) -> None:
        path, body = completion.call.path, completion.body
        completion.failures = self._suspects.begin(path, body)
        try:
            if completion.failures.exhausted:
                await completion.reply(completion.failure())
            else:
                await self._complete(completion)
        finally:
            self._suspects.end(path, body, completion.failures)
            self._prefilling.withdraw(completion)

    async def close(self) -> None:
        await self._prefilling.close()

    async def _complete(self, completion: Completion) -> None:
        if self._records(completion):
            completion.stream = Transcript(completion.call.path, completion.body)
        tried, offer = list[Backend](), None
        completion.holders = await self._find_holders(completion)
        cached = completion.holders.tokens_of
        alone = self._goes_alone(completion)
        if alone is None:
            backend = self._prefill.next(tried, completion.session, cached=cached)
            if backend is not None and (source := _stream_source(backend, completion)) is not None:
                tried.append(backend)
                if await self._streamed(completion, backend, source):
                    return
            offer = await self._prefilling.kv_of_prompt(completion, tried)
            if completion.failures.exhausted:
                await completion.reply(completion.failure())
                return
            alone = completion.without_kv if offer is None else None
        completion.call.record.note_decode(alone)
        await self._decoding.answer(completion, offer)

    def _records(self, completion: Completion) -> bool:
        """Return whether to keep the token ids of a stream, to continue it if its engine fails."""
        settings = self._settings
        return (
            settings.continue_streams
            and not settings.trust_kv_params  # those bodies are relayed unchanged
            and len(self._decode.backends) > 1
            and may_continue(completion.call.path, completion.body)
        )

    async def _find_holders(self, completion: Completion) -> PrefixHolders:
        """Find the engines that have a prefix of the prompt, if the engine that gets it may lack it."""
        path, body, session = completion.call.path, completion.body, completion.session
        # Trusted bodies are relayed unchanged. Engines do not read what a hint names for requests that
        # decode alone for reasons of their own. A response may, because a decode engine computes it alone.
        if self._settings.trust_kv_params or has_media(body) or completion.keeper is not None:
            return PrefixHolders()
        if decodes_alone(path, body) and path != RESPONSES:
            return PrefixHolders()
        if estimated_tokens(body) < LEAST_TOKENS:
            return PrefixHolders()
        backend = self._decode.next([], session, last_resort=True)
        turns = self._decoding.turns
        if session is not None and backend and turns.new_tokens(session, backend, path, body) is not None:
            return PrefixHolders()
        return await self._prefixes.find(path, body, completion.call.headers, backend)

    def _goes_alone(self, completion: Completion) -> AloneReason | None:
        """Return why the decode engine should compute the prompt; None if a hand-over is worth its cost."""
        path, body, session = completion.call.path, completion.body, completion.session
        if alone := decodes_alone(path, body):
            return alone
        limit, backend = self._settings.min_prefill_tokens, self._decoding.next([], completion)
        if backend is not None and backend.role is Role.BOTH:
            return AloneReason.BOTH
        if limit and not has_media(body):
            if estimated_tokens(body) < limit:
                return AloneReason.SHORT
            if session is not None and backend is not None:
                added = self._decoding.turns.new_tokens(session, backend, path, body)
                if added is not None and added < limit:
                    return AloneReason.KNOWN
        return AloneReason.INVALID if self._decoding.refusals.includes(path, body) else None

    async def _streamed(self, completion: Completion, backend: Backend, source: StreamSource) -> bool:
        """Ask a prefill and a decode engine at once, and relay the decode engine's answer to the client.

        If the prefill engine refuses the request, or computes the prompt but offers no KV, the decode engine
        is asked again without a ticket, unless the client has got data.

        Returns:
            False if the prefill engine failed before the client got any data, so that another may be asked.
        """
        ticket, record = new_ticket(), completion.call.record
        begun, over, failed = False, False, False

        async def send_noted(message: Any) -> None:
            nonlocal begun
            if over:
                await anyio.sleep_forever()  # it is being cancelled, and the client gets another answer
            begun = True
            await completion.send(message)

        async def prefill() -> None:
            nonlocal over, failed
            reply = await self._prefilling.prefilled(backend, completion, ticket)
            if reply is not None and reply.status == 200 and backend.note_hand_over(kv_params_of(reply.body)):
                return
            if begun:
                # The decode engine has begun its answer without this KV, so it computes the prompt itself.
                record.note_decode(completion.without_kv)
                return
            over, failed = True, reply is None
            group.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(prefill)
                record.note_decode(None)
                offer = Offer(backend, source.offer(ticket))
                await self._decoding.answer(replace(completion, send=send_noted), offer)
                group.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the callers know the exceptions of `answer`
        if over and not failed:
            record.note_decode(completion.without_kv)
            await self._decoding.answer(completion, None)
        return not failed


def _stream_source(backend: Backend, completion: Completion) -> StreamSource | None:
    """Return the engine to read from while it computes the prompt; None to ask the engines one by one."""
    source = backend.stream_source
    # A prompt that would queue at the prefill engine is not begun soon, and the decode engine does not wait
    # for it longer than its patience. A prompt of one step gains nothing.
    if source is None or backend.outstanding or estimated_tokens(completion.body) <= source.step_tokens:
        return None
    return source
