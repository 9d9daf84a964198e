"""The router as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Send

from kvferry.serving.router.backends import Backend, Pool
from kvferry.serving.router.bodies import (
    CHAT,
    COMPLETIONS,
    MalformedBody,
    encoded,
    parse_body,
    without_kv_params,
)
from kvferry.serving.router.endpoint import ActiveRequests, Call, RouterEndpoint
from kvferry.serving.router.failures import Failures
from kvferry.serving.router.flow import Completion, CompletionFlow
from kvferry.serving.router.hop import Hop, loop_reply
from kvferry.serving.router.probe import probe_all, watch_down
from kvferry.serving.router.replies import bad_request, unavailable
from kvferry.serving.router.settings import RouterSettings
from kvferry.serving.router.upstream import NOT_CONNECTED, describe_error, open_client, opened, read_whole

_PASSED_THROUGH = (("GET", "/v1/models"), ("GET", "/version"), ("POST", "/tokenize"), ("POST", "/detokenize"))
_PASS_SECONDS = 30.0


class RouterApp(Starlette):
    """The router's ASGI application. It can connect to engines only while its lifespan context is active."""

    def __init__(self, settings: RouterSettings) -> None:
        router = _Router(settings)
        self._ongoing = ActiveRequests()

        def endpoint(handler: Callable[[Call, Send], Awaitable[None]]) -> RouterEndpoint:
            return RouterEndpoint(handler, self._ongoing, router.hop, settings.max_body_bytes)

        routes = [Route(path, endpoint(router.complete), methods=["POST"]) for path in (COMPLETIONS, CHAT)]
        routes += [
            Route(path, endpoint(router.pass_through), methods=[method]) for method, path in _PASSED_THROUGH
        ]
        routes.append(Route("/health", router.health, methods=["GET"]))
        super().__init__(
            routes=routes,
            lifespan=router.lifespan,
            exception_handlers={HTTPException: _http_error, Exception: _our_fault},
        )

    def end_answers(self) -> None:
        """Cancel all requests under way. The clients get an error, and the engines abort the requests."""
        self._ongoing.end()


def router_app(settings: RouterSettings) -> RouterApp:
    """Return the ASGI application of a prefill/decode router with these settings."""
    return RouterApp(settings)


class _Router:
    """The request handlers of the router application, and the state that the handlers share."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._prefill = Pool("prefill", settings.prefill)
        self._decode = Pool("decode", settings.decode)
        self.hop = Hop()
        self._client: httpx.AsyncClient
        self._flow: CompletionFlow

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Keep an HTTP client open, and keep probing the engines that are down, while the application runs.

        This is the application's lifespan context. Its argument, the application, is not used.
        """
        backends = (*self._prefill.backends, *self._decode.backends)
        async with open_client(self._settings, self.hop) as self._client, anyio.create_task_group() as group:
            self._flow = CompletionFlow(self._settings, self._prefill, self._decode, self._client)
            group.start_soon(watch_down, self._client, backends, self._settings.probe_seconds)
            yield
            group.cancel_scope.cancel()

    async def complete(self, call: Call, send: Send) -> None:
        """Serve a client's completion request with a prefill engine and a decode engine.

        The client's ``kv_transfer_params`` are removed from the body, unless the router's settings say to
        trust them. A body that is not a JSON object is answered with an error.

        Args:
            call: request of the client.
            send: ASGI function that sends to the client.
        """
        try:
            body, raw = parse_body(call.body), call.body
            if not self._settings.trust_kv_params:
                body = without_kv_params(body)
                raw = encoded(body)  # so the engine reads exactly the checked fields
            completion = Completion(call.path, raw, body, call.headers, call.reply_headers)
            await self._flow.complete(completion, send)
        except MalformedBody as error:
            await bad_request(str(error), "invalid_json").send(send, call.reply_headers)

    async def pass_through(self, call: Call, send: Send) -> None:
        """Forward a request to a decode engine, and send the engine's answer to the client.

        If the engine is unreachable, closes the connection or answers too late, another engine is tried. The
        client gets an error if two engines accepted the request but failed, or if no engine is left to try.

        Args:
            call: request of the client.
            send: ASGI function that sends to the client.
        """
        failures, tried = Failures(), list[Backend]()
        while not failures.exhausted and (backend := self._decode.next(tried, even_down=True)):
            tried.append(backend)
            try:
                with anyio.fail_after(_PASS_SECONDS):
                    url = backend.url + call.path
                    async with opened(self._client, call.method, url, call.headers, call.body) as response:
                        reply = await read_whole(response)
            except NOT_CONNECTED as error:
                backend.mark_down(describe_error(error))
            except httpx.TransportError as error:
                backend.mark_down(describe_error(error))
                failures.add(backend, describe_error(error))
            except TimeoutError:
                failures.add(backend, f"no answer in {_PASS_SECONDS:g} s")
            else:
                await reply.send(send, call.reply_headers)
                return
        reply = (
            failures.reply(call.reply_headers) if failures else unavailable("no decode engine can be reached")
        )
        await reply.send(send, call.reply_headers)

    async def health(self, request: Request) -> Response:
        """Probe all engines, and return their states as JSON. The status is 503 if no decode engine is up."""
        if self.hop.has_seen(request.headers.raw):
            reply = loop_reply()
            return Response(reply.body, reply.status, media_type="application/json")
        pools = {"prefill": self._prefill.backends, "decode": self._decode.backends}
        await probe_all(self._client, [backend for backends in pools.values() for backend in backends])
        up = {role: any(one.up for one in backends) for role, backends in pools.items() if backends}
        status = "ok" if all(up.values()) else "degraded" if up["decode"] else "unavailable"
        engines = {
            role: [{"url": backend.url, "up": backend.up, "reason": backend.reason} for backend in backends]
            for role, backends in pools.items()
        }
        return JSONResponse({"status": status, **engines}, 200 if up["decode"] else 503)


async def _our_fault(_: Request, __: Exception) -> Response:
    # Starlette raises the error again after this answer, so it is logged with its traceback.
    reply = unavailable("the router failed; its log says why", "router_error", 500)
    return Response(reply.body, reply.status, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    what = f"{request.method} {request.url.path}"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    reply = bad_request(f"this router has no {what}", code, error.status_code)
    return Response(reply.body, reply.status, error.headers, "application/json")
