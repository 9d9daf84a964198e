"""Responses of ``/v1/responses`` that decode engines keep: the engine that has one, by its id."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import xxhash
from starlette.types import Send

from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.backends import Backend, Engines
from kvferry.tools.serving.router.endpoint import Call
from kvferry.tools.serving.router.events import RelayedStream, end_broken, is_events, relay_events
from kvferry.tools.serving.router.failures import is_failure
from kvferry.tools.serving.router.fleet import probe
from kvferry.tools.serving.router.replies import RESPONSES, RETRY_LATER, ApiError, Headers, Reply
from kvferry.tools.serving.router.upstream import (
    BROKEN,
    BrokenStream,
    EngineClient,
    describe_error,
    note_unreachable,
    read_whole,
)


def with_response_id(path: str, body: dict[str, Any], backend: Backend) -> dict[str, Any]:
    """Return the body of a request to a decode engine, with an id for the response if it makes one."""
    # An id that the client has chosen is kept.
    if path != RESPONSES or body.get("request_id") is not None:
        return body
    return {**body, "request_id": f"resp_{secrets.token_hex(16)}{_mark(backend)}"}


def previous_response(path: str, body: dict[str, Any]) -> str | None:
    """Return the id of the response that a request continues; None if it continues none."""
    found = body.get("previous_response_id") if path == RESPONSES else None
    return found if isinstance(found, str) else None


def not_found(response_id: str, unreachable: Sequence[Backend] = ()) -> Reply:
    """Return the error for a response that no engine has: 404, or 503 if an engine does not answer."""
    message = f"Response with id '{response_id}' not found"
    if unreachable:
        urls = ", ".join(backend.url for backend in unreachable)
        message += f": no decode engine that answers has it, and {urls} cannot be reached"
        return ApiError(503, message, "engine_unavailable", (RETRY_LATER,)).reply(RESPONSES)
    message += (
        " on any decode engine; engines started with VLLM_ENABLE_RESPONSES_API_STORE=1 keep responses "
        "until they end"
    )
    return ApiError(404, message, "response_not_found").reply(RESPONSES)


class Responses:
    """The responses that decode engines keep, also those that are being removed or now prefill."""

    def __init__(self, engines: Engines, client: EngineClient) -> None:
        self._engines, self._client = engines, client

    async def keeper_of(self, response_id: str, headers: Headers) -> Backend | Reply:
        """Return the decode engine that keeps a response, or the error for the client.

        The engine is known if the id names it, or if there is one engine only. It need not have the response.
        """
        known = self._engines.known
        backends = [one for one in known if response_id.endswith(_mark(one))]
        backends = backends or [one for one in known if one.role is not Role.PREFILL]
        if len(backends) == 1:
            return backends[0]
        unreachable = []
        for backend in backends:
            try:
                async with self._client.opened("GET", backend, _path_of(response_id), headers) as answer:
                    if answer.status == 200:
                        return backend
                    if answer.status == 404:
                        continue
                    if not is_failure(answer.status):
                        return await read_whole(answer)  # the engine wants another key
            except BROKEN as error:
                note_unreachable(backend, error)
            unreachable.append(backend)
        return not_found(response_id, unreachable)

    async def relay(self, call: Call, send: Send) -> None:
        """Send a request about a response to the engine that keeps it, and relay the answer to the client."""
        response_id, *action = call.path.removeprefix(f"{RESPONSES}/").split("/")
        keeper = await self.keeper_of(response_id, call.headers)
        if isinstance(keeper, Reply):
            await keeper.send(send, call.reply_headers)
            return
        target, stream = call.target("/".join([_path_of(response_id), *action])), RelayedStream()
        try:
            async with self._client.opened(call.method, keeper, target, call.headers, call.body) as answer:
                if is_events(answer):
                    await relay_events(answer, send, call.reply_headers, stream)
                    return
                reply = await read_whole(answer)
        except (*BROKEN, BrokenStream) as error:
            fault = describe_error(error)
            if stream.begun:
                call.record.broken = True
                await end_broken(send, RESPONSES, fault)
                return
            # vLLM also breaks the stream of a response that it has not made in the background.
            await probe(self._client, keeper)
            if keeper.up:
                message = f"decode engine {keeper.url} failed while answering: {fault}"
                reply = ApiError(500, message, "engine_failed").reply(RESPONSES)
            else:
                reply = not_found(response_id, [keeper])
        await reply.send(send, call.reply_headers)


def _path_of(response_id: str) -> str:
    return f"{RESPONSES}/{quote(response_id, safe='')}"


def _mark(backend: Backend) -> str:
    """Return the end of the ids of an engine's responses, 8 hex digits."""
    return f"{xxhash.xxh3_64_intdigest(backend.url.encode()) >> 32:08x}"
