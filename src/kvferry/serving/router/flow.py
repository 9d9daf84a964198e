"""The life of one completion: prefill on one engine, decode on another, and what follows when one fails.

    prefill engine ── kv_transfer_params ──→ decode engine ──→ client
         │ dead, refuses, too slow, hands over nothing
         └→ the next prefill engine, or none: the decode engine computes the prompt itself

Cancelling the task that runs `complete` closes the connection to the engine at work, which makes it abort.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
import httpx
from starlette.types import Send

from kvferry.serving.router.backends import Backend, Pool
from kvferry.serving.router.bodies import (
    decode_body,
    decodes_alone,
    handed_over,
    prefill_body,
    wants_stream,
)
from kvferry.serving.router.events import BrokenBeforeFirst, is_events, relay_events
from kvferry.serving.router.replies import Headers, Reply, unavailable
from kvferry.serving.router.settings import RouterSettings
from kvferry.serving.router.upstream import opened, read_whole, says

_TOO_BUSY = 429


@dataclass(frozen=True, slots=True)
class Completion:
    """One request of a caller.

    Attributes:
        path: of the endpoint, as ``/v1/completions``.
        raw: its body as it came.
        body: the same, parsed.
        headers: for the engines, with x-request-id.
        echoed: headers that the answer gets on top of the engine's.
    """

    path: str
    raw: bytes
    body: dict[str, Any]
    headers: Headers
    echoed: Headers


class Flow:
    """Serves completions from these engines."""

    def __init__(
        self, settings: RouterSettings, prefill: Pool, decode: Pool, client: httpx.AsyncClient
    ) -> None:
        self._settings = settings
        self._prefill = prefill
        self._decode = decode
        self._client = client

    async def complete(self, completion: Completion, send: Send) -> None:
        """Answer the caller, in whatever way is left."""
        params = None
        if not decodes_alone(completion.body):
            params = await self._kv_of_prompt(completion)
        if isinstance(params, Reply):
            await params.send(send, completion.echoed)
        else:
            await self._answer(completion, params, send)

    async def _kv_of_prompt(self, completion: Completion) -> dict[str, Any] | Reply | None:
        """Where the prompt's KV is; or why the request is wrong; None if no engine computed it."""
        body = prefill_body(completion.body)
        tried: list[Backend] = []
        while backend := self._prefill.next(tried):
            tried.append(backend)
            reply = await self._prefilled(backend, completion, body)
            if reply is None:
                continue
            if reply.status != 200:
                return reply
            params = handed_over(reply.body)
            backend.note_hand_over(done=params is not None)
            if params is not None:
                return params
        return None

    async def _prefilled(self, backend: Backend, completion: Completion, body: bytes) -> Reply | None:
        """This engine's answer; None if it is dead, refuses or takes too long, and is now down."""
        url = backend.url + completion.path
        try:
            with self._prefill.turn(backend), anyio.fail_after(self._settings.prefill_seconds):
                async with opened(self._client, "POST", url, completion.headers, body) as response:
                    reply = await read_whole(response)
        except httpx.TransportError as error:
            backend.mark_down(says(error))
            return None
        except TimeoutError:
            backend.mark_down(f"no answer in {self._settings.prefill_seconds:g} s")
            return None
        if _refuses(reply.status):
            backend.mark_down(f"it answers with status {reply.status}")
            return None
        return reply

    async def _answer(self, completion: Completion, params: dict[str, Any] | None, send: Send) -> None:
        """Have a decode engine answer; the next one if it fails before the caller got anything."""
        tried: list[Backend] = []
        last = unavailable("no decode engine can be reached")
        while backend := self._decode.next(tried, even_down=True):
            tried.append(backend)
            body = decode_body(completion.body, params) if params else completion.raw
            url = backend.url + completion.path
            try:
                with self._decode.turn(backend):
                    async with opened(self._client, "POST", url, completion.headers, body) as response:
                        backend.mark_up()
                        if wants_stream(completion.body) and is_events(response):
                            if fault := await relay_events(response, send, completion.echoed):
                                backend.mark_down(fault)
                            return
                        reply = await read_whole(response)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                backend.mark_down(says(error))
                continue
            except (httpx.TransportError, BrokenBeforeFirst) as error:
                backend.mark_down(says(error))
                # It may have fetched the KV, and the prefill engine then no longer keeps it.
                params = None
                continue
            if not _refuses(reply.status):
                await reply.send(send, completion.echoed)
                return
            last, params = reply, None
        await last.send(send, completion.echoed)


def _refuses(status: int) -> bool:
    """An answer that says nothing about the request itself: another engine may serve it."""
    return status >= 500 or status == _TOO_BUSY
