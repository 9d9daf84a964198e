"""The router as an ASGI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Send

from kvferry.common.limited_log import LimitedLog
from kvferry.tools.serving.router.backends import Backend, Engines, session_of
from kvferry.tools.serving.router.bodies import (
    CHAT,
    COMPLETIONS,
    DECODE_ONLY,
    DETOKENIZE,
    MalformedBody,
    fault_of_hints,
    parse_body,
    without_kv_params,
)
from kvferry.tools.serving.router.completion import Completion
from kvferry.tools.serving.router.endpoint import ActiveRequests, Call, RouterEndpoint
from kvferry.tools.serving.router.failures import Failures
from kvferry.tools.serving.router.fleet import Introductions, Prober, watch_engines
from kvferry.tools.serving.router.flow import CompletionFlow
from kvferry.tools.serving.router.metrics import CONTENT_TYPE, RouterMetrics
from kvferry.tools.serving.router.prefixes import Prefixes
from kvferry.tools.serving.router.replies import MESSAGES, NO_DECODE_ENGINE, RESPONSES, ApiError, Reply
from kvferry.tools.serving.router.responses import Responses, previous_response
from kvferry.tools.serving.router.settings import KeyCheck, RouterSettings
from kvferry.tools.serving.router.upstream import (
    BROKEN,
    LOOP,
    NOT_CONNECTED,
    EngineClient,
    Hop,
    describe_error,
    note_unreachable,
    read_whole,
)

logger = logging.getLogger(__name__)

_COMPLETED = (COMPLETIONS, CHAT, MESSAGES, *sorted(DECODE_ONLY))
# Any decode engine can answer them.
_PASSED_THROUGH = {
    "/v1/models": "GET",
    "/version": "GET",
    "/tokenizer_info": "GET",
    "/tokenize": "POST",
    DETOKENIZE: "POST",
}

_ONE_ENGINE = "it describes or changes a single engine; send it to the engine itself"
_BY_TOKENS = "it would let clients choose what an engine does for another one; send it to the engine itself"
_AUDIO = "the router relays no audio; send it to the engine itself"

# Reasons by path, for all methods.
REFUSED = {
    **dict.fromkeys(
        (
            "/abort_requests",
            "/adapters",
            "/adapters/{adapter_name}",
            "/collective_rpc",
            "/docs",
            "/docs/oauth2-redirect",
            "/fault_tolerance/apply",
            "/fault_tolerance/status",
            "/finish_weight_update",
            "/get_world_size",
            "/init_weight_transfer_engine",
            "/is_paused",
            "/is_scaling_elastic_ep",
            "/is_sleeping",
            "/kv_event_sources",
            "/openapi.json",
            "/pause",
            "/redoc",
            "/release_kv_cache_memory",
            "/reset_encoder_cache",
            "/reset_mm_cache",
            "/reset_prefix_cache",
            "/resume",
            "/scale_elastic_ep",
            "/server_info",
            "/shutdown_weight_transfer_engine",
            "/sleep",
            "/start_draft_weight_update",
            "/start_profile",
            "/start_weight_update",
            "/stop_profile",
            "/update_weight_version",
            "/update_weights",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/wake_up",
            "/weight_checker",
            "/weight_info",
        ),
        _ONE_ENGINE,
    ),
    **dict.fromkeys(("/inference/v1/abort_requests", "/inference/v1/generate"), _BY_TOKENS),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime"), _AUDIO),
}

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class RouterApp(Starlette):
    """The router's ASGI application. It can connect to engines only while its lifespan context is active."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._ongoing = ActiveRequests()
        self._engines = Engines(settings.prefill, settings.decode, settings.clock)
        self._decode = self._engines.decode
        self._hop = Hop()
        self._log = LimitedLog(logger)
        self._prefixes = Prefixes(self._engines, settings.probe_seconds)
        self._metrics = RouterMetrics(lambda: self._engines.known, self._prefixes)
        self._client: EngineClient
        self._flow: CompletionFlow
        self._responses: Responses
        self._prober: Prober
        super().__init__(
            routes=self._routes(),
            middleware=_middleware(settings, self._metrics),
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _http_error, Exception: _our_fault},
        )

    def _routes(self) -> list[Route]:
        def relay(method: str, path: str, handler: Callable[[Call, Send], Awaitable[None]]) -> Route:
            most = self._settings.max_body_bytes
            endpoint = RouterEndpoint(handler, self._ongoing, self._hop, most, self._metrics)
            return Route(path, endpoint, methods=[method])

        return [
            *(relay("POST", path, self._complete) for path in _COMPLETED),
            *(relay(method, path, self._pass_through) for path, method in _PASSED_THROUGH.items()),
            relay("GET", f"{RESPONSES}/{{response_id}}", self._of_response),
            relay("POST", f"{RESPONSES}/{{response_id}}/cancel", self._of_response),
            *(Route(path, _refusal(reason), methods=_METHODS) for path, reason in REFUSED.items()),
            Route("/health", self._health, methods=["GET"]),
            Route("/load", self._load, methods=["GET"]),
            Route("/metrics", self._metrics_page, methods=["GET"]),
            Route("/ping", self._health, methods=["GET", "POST"]),
        ]

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait until those under way have ended.

        Until the server closes, ``/health`` answers with status 503 and says that the router drains.
        """
        self._ongoing.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ongoing.wait_ended()

    def end_answers(self) -> None:
        """Cancel all requests under way. The clients get an error, and the engines abort the requests."""
        self._ongoing.end()

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        settings, engines = self._settings, self._engines
        async with EngineClient(settings, self._hop) as self._client:
            self._flow = CompletionFlow(settings, engines, self._client, self._prefixes)
            self._responses = Responses(engines, self._client)
            self._prober = Prober(self._client, engines, settings)
            tasks = {asyncio.create_task(self._prober.run())}
            if settings.follow_events:
                tasks.add(asyncio.create_task(self._prefixes.run(self._client)))
            if settings.introduce:
                introductions = Introductions(settings, engines, self._client, self._hop)
                tasks.add(asyncio.create_task(introductions.run()))
            if (path := settings.engines_file) is not None:
                tasks.add(asyncio.create_task(watch_engines(path, engines, settings.probe_seconds)))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                await self._flow.close()

    async def _complete(self, call: Call, send: Send) -> None:
        try:
            body = parse_body(call.body)
            if not self._settings.trust_kv_params:
                if fault := fault_of_hints(body):
                    self._log.say(fault, f"a request's {fault}; they are dropped")
                body = without_kv_params(body)
            completion = Completion(call, body, send, session_of(call.headers, body))
            for pool in (self._engines.prefill, self._decode):
                await self._prober.until_up(pool)
            if (previous := previous_response(call.path, body)) is not None:
                found = await self._responses.keeper_of(previous, call.headers)
                if isinstance(found, Reply):
                    await completion.reply(found)
                    return
                completion.keeper = found
            await self._flow.complete(completion)
        except MalformedBody as error:
            reply = ApiError(400, str(error), "invalid_json").reply(call.path)
            await reply.send(send, call.reply_headers)

    async def _pass_through(self, call: Call, send: Send) -> None:
        """Forward a request to a decode engine, and send the engine's answer to the client.

        If the engine is unreachable, closes the connection or is silent, another engine is tried. The
        client gets an error if two engines accepted the request but failed, or if no engine is left to try.
        """
        await self._prober.until_up(self._decode)
        failures, tried, reply = Failures(), list[Backend](), None
        while not failures.exhausted and (backend := self._decode.next(tried, last_resort=True)):
            tried.append(backend)
            try:
                async with self._client.opened(
                    call.method, backend, call.target(call.path), call.headers, call.body
                ) as response:
                    reply = await read_whole(response)
                    break
            except NOT_CONNECTED as error:
                note_unreachable(backend, error)
            except BROKEN as error:
                note_unreachable(backend, error)
                failures.add(backend, describe_error(error))
        if reply is None and failures:
            reply = failures.reply(call.path, call.reply_headers)
        await (reply or NO_DECODE_ENGINE.reply(call.path)).send(send, call.reply_headers)

    async def _of_response(self, call: Call, send: Send) -> None:
        await self._prober.until_up(self._decode)
        await self._responses.relay(call, send)

    async def _health(self, request: Request) -> Response:
        """Return the states of all engines as JSON, as the last probes found them.

        The status is 503 if no decode engine is up, or if the router drains. If engines were not probed yet,
        the answer waits for that, but at most half a second.
        """
        # The probe of a router that has itself for an engine ends here, and finds that engine down.
        if self._hop.has_seen(request.headers.raw):
            return _response(LOOP, request)
        pools = {"prefill": self._engines.prefill.backends, "decode": self._decode.backends}
        await self._prober.first_probes()
        up = {role: any(one.up for one in backends) for role, backends in pools.items() if backends}
        # Without prefill engines the decode engines compute prompts, so the router still serves.
        status = "ok" if all(up.values()) else "degraded" if up["decode"] else "unavailable"
        if self._ongoing.draining:
            status = "draining"
        found = {
            "status": status,
            **{
                role: [{"url": one.url, "up": one.up, "reason": one.reason} for one in backends]
                for role, backends in pools.items()
            },
            "draining": [
                {"role": one.role, "url": one.url, "requests": one.outstanding}
                for one in self._engines.known
                if one.draining
            ],
        }
        return JSONResponse(found, 200 if status in ("ok", "degraded") else 503)

    async def _load(self, _: Request) -> Response:
        return JSONResponse({"server_load": len(self._ongoing)})

    async def _metrics_page(self, _: Request) -> Response:
        return Response(self._metrics.page(), headers={"content-type": CONTENT_TYPE})


def _middleware(settings: RouterSettings, metrics: RouterMetrics) -> list[Middleware]:
    found = []
    if settings.allowed_origins:  # before the keys: a browser's preflight request has none
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=("*",),
                allow_headers=("*",),
                expose_headers=("x-request-id",),
            )
        )
    if settings.api_keys or settings.engine_key is not None:
        found.append(
            Middleware(
                KeyCheck,
                keys=settings.api_keys,
                engine_key=settings.engine_key,
                on_refused=metrics.count_unauthorized,
            )
        )
    return found


def _refusal(reason: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        message = f"this router does not relay {request.method} {request.url.path}: {reason}"
        return _response(ApiError(404, message, "not_found"), request)

    return refuse


async def _our_fault(request: Request, _: Exception) -> Response:
    # Starlette raises the error again after this answer, so it is logged with its traceback.
    return _response(ApiError(500, "the router failed; its log says why", "router_error"), request)


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    what = f"{request.method} {request.url.path}"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    found = ApiError(error.status_code, f"this router has no {what}", code)
    return _response(found, request, error.headers)


def _response(error: ApiError, request: Request, headers: Mapping[str, str] | None = None) -> Response:
    reply = error.reply(request.url.path)
    return Response(reply.body, reply.status, headers, "application/json")
