"""Serve one completion: prefill on one engine, decode on another, and retries after failures.

    prefill engine ── kv_transfer_params ──→ decode engine ──→ client
         │ dead, silent, busy, or no kv_transfer_params
         └→ the next prefill engine; without one, the decode engine computes the prompt

If a prefill engine refuses the request, the decode engine answers it alone.

If a long prompt finds an idle prefill engine that can hand over KV while it computes, both engines are asked
at once (`streaming`). If the prefill engine then fails before the client got any data, the decode engine's
request is cancelled, and the next prefill engine is asked as above.

If a decode engine fails while the client gets its stream, another one continues it (`continuation`).

The request itself may make an engine fail. After a failure it is therefore retried on only one further engine
(`failures`).

Cancelling the task that runs `complete` closes the connection to the engine, which then aborts the request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import anyio
from starlette.types import Send

from kvferry.common.limited_log import LimitedLog
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.backends import Backend, Engines, StreamSource, new_ticket
from kvferry.tools.serving.router.bodies import (
    COMPLETIONS,
    DECODE_ONLY,
    DETOKENIZE,
    api_of,
    decode_body,
    decodes_alone,
    encoded,
    kv_params_of,
    prefill_body,
    prefill_headers,
    text_of,
    wants_stream,
    withdrawal_body,
    withdrawal_headers,
)
from kvferry.tools.serving.router.continuation import Transcript, may_continue, whole_characters
from kvferry.tools.serving.router.endpoint import Call
from kvferry.tools.serving.router.events import (
    EngineGaveUp,
    RelayedStream,
    end_broken,
    is_events,
    relay_events,
)
from kvferry.tools.serving.router.failures import (
    Failures,
    Refusals,
    Suspects,
    failure_of,
    is_busy,
    is_failure,
)
from kvferry.tools.serving.router.fleet import probe
from kvferry.tools.serving.router.metrics import AloneReason
from kvferry.tools.serving.router.prompts import Turns, estimated_tokens, has_media
from kvferry.tools.serving.router.replies import NO_DECODE_ENGINE, RESPONSES, Headers, Reply
from kvferry.tools.serving.router.responses import not_found, previous_response, with_response_id
from kvferry.tools.serving.router.settings import RouterSettings
from kvferry.tools.serving.router.upstream import (
    BROKEN,
    LOOP_DETECTED,
    LOOP_REASON,
    NOT_CONNECTED,
    BrokenStream,
    EngineClient,
    describe_error,
    note_unreachable,
    read_whole,
)

_log = logging.getLogger("kvferry.router")


@dataclass(slots=True)
class Completion:
    """A completion request of a client, and what has happened to it."""

    call: Call
    body: dict[str, Any]
    send: Send
    session: int | None = None  # session of the request, as `session_of` returns it; None if it has none
    # Decode engine that keeps the response which the request continues; None if any may answer.
    keeper: Backend | None = None
    # The stream that the client gets, if its answer is one.
    stream: RelayedStream = field(default_factory=RelayedStream)
    # Body of the request for the rest of the stream; None before an engine has failed in it.
    rest: dict[str, Any] | None = None
    # Failures of engines during this request, and deaths during equal ones.
    failures: Failures = field(default_factory=Failures)
    # Prefill engines that may hold KV for this request, by the name of that KV.
    held: dict[str, Backend] = field(default_factory=dict)
    # Prefill engines that have refused this request, each with a description of its answer.
    refusals: list[tuple[Backend, str]] = field(default_factory=list)

    @property
    def without_kv(self) -> AloneReason:
        """Reason why prefill engines were asked, but the decode engine computes the prompt."""
        return AloneReason.REFUSED if self.refusals else AloneReason.NO_KV

    @property
    def asked(self) -> dict[str, Any]:
        """Body of the request to engines, without what the router adds."""
        return self.body if self.rest is None else self.rest

    async def reply(self, reply: Reply) -> None:
        """Send the answer to the client. A stream that has begun cannot have another answer, and ends."""
        if self.stream.begun:
            await self.end_broken()
        else:
            await reply.send(self.send, self.call.reply_headers)

    async def end_broken(self) -> None:
        self.call.record.broken = True
        await end_broken(self.send, self.call.path, self.failures.latest)

    def failure(self) -> Reply:
        return self.failures.reply(self.call.path, self.call.reply_headers)


class Offer(NamedTuple):
    """The KV of a prompt in a prefill engine, for a decode engine."""

    backend: Backend
    params: dict[str, Any]  # ``kv_transfer_params``


class CompletionFlow:
    """Handler of completion requests."""

    def __init__(self, settings: RouterSettings, engines: Engines, client: EngineClient) -> None:
        self._settings, self._client = settings, client
        self._prefill, self._decode = engines.prefill, engines.decode
        self._suspects = Suspects(settings.clock)
        self._turns = Turns()
        self._mismatches = LimitedLog(_log)
        self._refusals = Refusals()
        self._withdrawals: dict[Backend, asyncio.Task[None]] = {}

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
            # Nobody will read this KV: the client has left, or the request failed before a decode engine
            # answered. Without word of that, it would fill the prefill engine until its lease expires.
            for name, backend in completion.held.items():
                backend.unwanted.append(name)
                if backend not in self._withdrawals:
                    headers = withdrawal_headers(completion.call.headers)
                    task = asyncio.create_task(self._withdraw(backend, headers, body.get("model")))
                    self._withdrawals[backend] = task

    async def _withdraw(self, backend: Backend, headers: Headers, model: Any) -> None:
        """Tell a prefill engine which KV is unwanted. If it cannot be reached or refuses, leases expire."""
        # The next prompt for this engine, if there is one by then, takes the names along at no cost.
        await asyncio.sleep(self._settings.probe_seconds)
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

    async def _complete(self, completion: Completion) -> None:
        if self._records(completion):
            completion.stream = Transcript(completion.call.path, completion.body)
        tried, offer = list[Backend](), None
        alone = self._goes_alone(completion)
        if alone is None:
            backend = self._prefill.next(tried, completion.session)
            if backend is not None and (source := _stream_source(backend, completion)) is not None:
                tried.append(backend)
                if await self._streamed(completion, backend, source):
                    return
            offer = await self._kv_of_prompt(completion, tried)
            if completion.failures.exhausted:
                await completion.reply(completion.failure())
                return
            alone = completion.without_kv if offer is None else None
        completion.call.record.note_decode(alone)
        await self._answer(completion, offer)

    def _records(self, completion: Completion) -> bool:
        """Return whether to keep the token ids of a stream, to continue it if its engine fails."""
        settings = self._settings
        return (
            settings.continue_streams
            and not settings.trust_kv_params  # those bodies are relayed unchanged
            and len(self._decode.backends) > 1
            and may_continue(completion.call.path, completion.body)
        )

    def _goes_alone(self, completion: Completion) -> AloneReason | None:
        """Return why the decode engine should compute the prompt; None if a hand-over is worth its cost."""
        path, body, session = completion.call.path, completion.body, completion.session
        if alone := decodes_alone(path, body):
            return alone
        limit, backend = self._settings.min_prefill_tokens, self._decode.next([], session, last_resort=True)
        if backend is not None and backend.role is Role.BOTH:
            return AloneReason.BOTH
        if limit and not has_media(body):
            if estimated_tokens(body) < limit:
                return AloneReason.SHORT
            if session is not None and backend is not None:
                added = self._turns.new_tokens(session, backend, path, body)
                if added is not None and added < limit:
                    return AloneReason.KNOWN
        return AloneReason.INVALID if self._refusals.includes(path, body) else None

    def _note_answer(self, completion: Completion, backend: Backend, status: int, *, with_kv: bool) -> None:
        if status == LOOP_DETECTED:
            backend.mark_down(LOOP_REASON)
            return
        backend.mark_up()
        if status == 200 and with_kv:
            completion.held.clear()  # a decode engine that has read KV ends the lease itself
        path, body, record = completion.call.path, completion.body, completion.call.record
        if completion.rest is not None:
            return  # says nothing about the client's own fields
        if (
            status == 200
            and completion.session is not None
            and self._settings.min_prefill_tokens
            and api_of(path, body) not in DECODE_ONLY
        ):
            self._turns.remember(completion.session, backend, path, body)
        # Compare the engine's verdict on the request with that of the prefill engines that were asked.
        if status == 200 and record.alone is AloneReason.INVALID:
            self._refusals.discard(path, body)
        elif status == 200 and record.alone is AloneReason.REFUSED:
            refusing, answer = completion.refusals[-1]
            self._mismatches.say(
                refusing.url,
                f"prefill engine {refusing.url} refuses requests that decode engine {backend.url} accepts "
                f"({answer}); start both with the same model and limits",
            )
        elif 400 <= status < 500 and not is_busy(status) and record.prefill_seconds is not None:
            self._refusals.add(path, body)

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
            reply = await self._prefilled(backend, completion, ticket)
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
                await self._answer(replace(completion, send=send_noted), offer)
                group.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the callers know the exceptions of `_answer`
        if over and not failed:
            record.note_decode(completion.without_kv)
            await self._answer(completion, None)
        return not failed

    async def _kv_of_prompt(self, completion: Completion, tried: list[Backend]) -> Offer | None:
        """Have a prefill engine compute the prompt, and return the offer of its KV.

        Return None if no prefill engine offers KV, if one refuses the request, or if too many engines failed.
        In the first two cases the decode engine answers the request.

        Args:
            tried: prefill engines that have failed already. Further ones are added.
        """
        while not completion.failures.exhausted and (
            backend := self._prefill.next(tried, completion.session)
        ):
            tried.append(backend)
            reply = await self._prefilled(backend, completion, None)
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

    async def _prefilled(self, backend: Backend, completion: Completion, ticket: str | None) -> Reply | None:
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
        body = prefill_body(completion.asked, ticket, name, unwanted)
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

    def _next_decode(self, tried: list[Backend], completion: Completion) -> Backend | None:
        if completion.keeper is None:
            return self._decode.next(tried, completion.session, last_resort=True)
        return None if completion.keeper in tried else completion.keeper

    async def _answer(
        self, completion: Completion, offer: Offer | None, tried: Sequence[Backend] = ()
    ) -> None:
        """Send a request to a decode engine, and relay its answer to the client.

        If the engine is unreachable, is busy, or fails before the client got any data, try another engine.
        If it fails later, another engine continues the stream if that is possible. After two failures, send
        an error to the client instead.

        Args:
            offer: the prompt's KV; None if the decode engine computes the prompt.
            tried: engines to skip.
        """
        call, failures, stream = completion.call, completion.failures, completion.stream
        tried = [*tried]
        last: Reply | None = _no_engine(completion)
        while backend := self._next_decode(tried, completion):
            tried.append(backend)
            try:
                reply = await self._ask(completion, backend, offer)
            except NOT_CONNECTED as error:
                note_unreachable(backend, error)
                continue
            except (*BROKEN, BrokenStream) as error:
                await self._note_failure(completion, backend, error)
                last = None
            else:
                if reply is None:
                    return
                if not is_busy(reply.status) and not is_failure(reply.status):
                    backend.note_success()
                    failures.answered = not stream.begun
                    await completion.reply(reply)
                    return
                last = reply
                backend.back_off()
                if not is_failure(reply.status):
                    continue  # it did not take the request, so the prefill engine still has the KV
                failures.add(backend, failure_of(reply))
                # The error of an engine that is dying or being stopped says nothing about the request, so
                # the client should not get it.
                await probe(self._client, backend)
                last = reply if backend.up else None
            if stream.begun:
                await self._continue(completion, tried)
                return
            # The failed engine may have read the KV, and then the prefill engine has freed it.
            call.record.note_ticket_lost()
            offer = None
            if failures.exhausted:
                last = None
                break
        await completion.reply(last or completion.failure())

    async def _ask(self, completion: Completion, backend: Backend, offer: Offer | None) -> Reply | None:
        """Send a request to a decode engine. Return its answer; None if that was a stream, which is relayed.

        Raises:
            aiohttp.ClientError: the connection broke.
            SilentEngine: the engine is silent.
            BrokenStream: the engine's stream ended before its last event.
        """
        call, stream = completion.call, completion.stream
        # An engine that has computed the prompt for another one has it in its own cache.
        params = None if offer is None or offer.backend is backend else offer.params
        if self._settings.trust_kv_params and params is None and call.path != RESPONSES:
            body = call.body
        else:
            # Encoded anew, so that the engine reads only fields that were checked. A response also gets an id
            # that names the engine.
            asked = stream.asks(with_response_id(call.path, completion.asked, backend))
            body = decode_body(asked, params)
        with backend.count_request():
            async with self._client.opened("POST", backend, call.path, call.headers, body) as response:
                self._note_answer(completion, backend, response.status, with_kv=params is not None)
                if not (wants_stream(completion.body) and is_events(response)):
                    return await read_whole(response)
                await relay_events(response, completion.send, call.reply_headers, stream)
        completion.failures.answered = True
        return None

    async def _note_failure(self, completion: Completion, backend: Backend, error: Exception) -> None:
        completion.failures.add(backend, describe_error(error))
        if isinstance(error, EngineGaveUp):
            backend.back_off()
            await probe(self._client, backend)
        else:
            note_unreachable(backend, error)

    async def _continue(self, completion: Completion, failed: Sequence[Backend]) -> None:
        """Have another decode engine continue a stream whose engine has failed. Else end it with an error."""
        call, stream, failures = completion.call, completion.stream, completion.failures
        if not isinstance(stream, Transcript) or not stream.continuable:
            await completion.end_broken()
            return
        if stream.finished:
            failures.answered = True
            await completion.send({"type": "http.response.body", "body": stream.end()})
            return
        (prompt, answer), tried, kept = stream.tokens(), [*failed], None
        if not failures.exhausted:
            ask = partial(self._text_of, completion, tried)
            kept = await whole_characters(prompt, answer, stream.max_dropped, ask)
        if kept is None:
            await completion.end_broken()
            return
        rest = stream.continued(call.path, prompt, kept)
        completion = replace(completion, stream=rest, rest=rest.body)
        _log.warning(
            "request %s goes on at another decode engine, after %d tokens: %s",
            call.reply_headers[0][1].decode(errors="replace"), len(kept), failures.latest,
        )  # fmt: skip
        call.record.continued = True
        offer, backend = None, self._next_decode(tried, completion)
        is_short = len(rest.known) < self._settings.min_prefill_tokens
        if backend is not None and backend.role is not Role.BOTH and not is_short:
            offer = await self._kv_of_prompt(completion, [*failed])
        if failures.exhausted:
            await completion.end_broken()
        else:
            await self._answer(completion, offer, tried)

    async def _text_of(self, completion: Completion, tried: list[Backend], tokens: list[int]) -> str | None:
        """Ask a decode engine for the text of tokens. Return None if none answers.

        Args:
            tried: engines not to ask. Those that cannot be reached are added.
        """
        body = encoded({"model": completion.body.get("model"), "tokens": tokens})
        headers = prefill_headers(completion.call.headers)
        while backend := self._next_decode(tried, completion):
            try:
                async with self._client.opened("POST", backend, DETOKENIZE, headers, body) as response:
                    return text_of((await read_whole(response)).body)
            except NOT_CONNECTED as error:
                note_unreachable(backend, error)
                tried.append(backend)
            except BROKEN as error:
                note_unreachable(backend, error)
                return None
        return None


def _no_engine(completion: Completion) -> Reply:
    path = completion.call.path
    if completion.keeper is None:
        return NO_DECODE_ENGINE.reply(path)
    return not_found(previous_response(path, completion.body) or "", [completion.keeper])


def _stream_source(backend: Backend, completion: Completion) -> StreamSource | None:
    """Return the engine to read from while it computes the prompt; None to ask the engines one by one."""
    source = backend.stream_source
    # A prompt that would queue at the prefill engine is not begun soon, and the decode engine does not wait
    # for it longer than its patience. A prompt of one step gains nothing.
    if source is None or backend.outstanding or estimated_tokens(completion.body) <= source.step_tokens:
        return None
    return source
