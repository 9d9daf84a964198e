"""The decode half of a completion: a decode engine answers, or after its failure another one.

If a decode engine fails while the client gets its stream, another one continues it (`continuation`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvferry.common.limited_log import LimitedLog
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.backends import Backend, Pool
from kvferry.tools.serving.router.bodies import (
    DECODE_ONLY,
    DETOKENIZE,
    api_of,
    decode_body,
    encoded,
    prefill_headers,
    text_of,
    wants_stream,
)
from kvferry.tools.serving.router.completion import Completion, Offer
from kvferry.tools.serving.router.continuation import Transcript, whole_characters
from kvferry.tools.serving.router.events import EngineGaveUp, is_events, relay_events
from kvferry.tools.serving.router.failures import Refusals, failure_of, is_busy, is_failure
from kvferry.tools.serving.router.fleet import probe
from kvferry.tools.serving.router.metrics import AloneReason
from kvferry.tools.serving.router.prefilling import Prefilling
from kvferry.tools.serving.router.prompts import Turns
from kvferry.tools.serving.router.replies import NO_DECODE_ENGINE, RESPONSES, Reply
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


class Decoding:
    """Requests to decode engines, and what their answers tell.

    Attributes:
        turns: the last prompts of sessions.
        refusals: fields of requests that decode engines have refused.
    """

    def __init__(
        self, settings: RouterSettings, pool: Pool, client: EngineClient, prefilling: Prefilling
    ) -> None:
        self._settings, self._pool, self._client, self._prefilling = settings, pool, client, prefilling
        self.turns, self.refusals = Turns(), Refusals()
        self._mismatches = LimitedLog(_log)

    def next(self, tried: list[Backend], completion: Completion) -> Backend | None:
        if completion.keeper is None:
            cached = completion.holders.tokens_of
            return self._pool.next(tried, completion.session, cached=cached, last_resort=True)
        return None if completion.keeper in tried else completion.keeper

    async def answer(
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
        while backend := self.next(tried, completion):
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
            asked = completion.hinted(backend) if params is None else completion.asked
            asked = stream.asks(with_response_id(call.path, asked, backend))
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
        offer, backend = None, self.next(tried, completion)
        is_short = len(rest.known) < self._settings.min_prefill_tokens
        if backend is not None and backend.role is not Role.BOTH and not is_short:
            offer = await self._prefilling.kv_of_prompt(completion, [*failed])
        if failures.exhausted:
            await completion.end_broken()
        else:
            await self.answer(completion, offer, tried)

    async def _text_of(self, completion: Completion, tried: list[Backend], tokens: list[int]) -> str | None:
        """Ask a decode engine for the text of tokens. Return None if none answers.

        Args:
            tried: engines not to ask. Those that cannot be reached are added.
        """
        body = encoded({"model": completion.body.get("model"), "tokens": tokens})
        headers = prefill_headers(completion.call.headers)
        while backend := self.next(tried, completion):
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
            self.turns.remember(completion.session, backend, path, body)
        # Compare the engine's verdict on the request with that of the prefill engines that were asked.
        if status == 200 and record.alone is AloneReason.INVALID:
            self.refusals.discard(path, body)
        elif status == 200 and record.alone is AloneReason.REFUSED:
            refusing, answer = completion.refusals[-1]
            self._mismatches.say(
                refusing.url,
                f"prefill engine {refusing.url} refuses requests that decode engine {backend.url} accepts "
                f"({answer}); start both with the same model and limits",
            )
        elif 400 <= status < 500 and not is_busy(status) and record.prefill_seconds is not None:
            self.refusals.add(path, body)


def _no_engine(completion: Completion) -> Reply:
    path = completion.call.path
    if completion.keeper is None:
        return NO_DECODE_ENGINE.reply(path)
    return not_found(previous_response(path, completion.body) or "", [completion.keeper])
