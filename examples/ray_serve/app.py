"""The application: an ingress that sends each request to a prefill and then to a decode engine.

serve run examples.ray_serve.app:build model=Qwen/Qwen3-0.6B prefill=1 decode=2
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from examples.ray_serve.engine import EngineReplica
from kvferry.tools.serving.router.bodies import (
    MalformedBody,
    decode_body,
    decodes_alone,
    encoded,
    kv_params_of,
    parse_body,
    prefill_body,
    wants_stream,
    without_kv_params,
)

ATTEMPTS = 2
"""Engines that a decode request may be sent to. The request itself may make engines fail, so few."""

PAUSE_SECONDS = 1.0
"""Seconds before the second attempt, in which Ray Serve takes a replica that has ended out of use."""

HEALTH = {"health_check_period_s": 1.0, "health_check_timeout_s": 10.0}
OK = 200
FAILURES = (RayError, RayServeException)
"""Of a replica that has ended, of its engine (as a RayTaskError), or of a deployment without replicas."""


class Ingress:
    """Answers requests of OpenAI's API. Ray Serve chooses the replicas."""

    def __init__(self, prefill: DeploymentHandle, decode: DeploymentHandle) -> None:
        """Store the handles of both deployments."""
        self._prefill = prefill
        self._decode = decode

    async def __call__(self, request: Request) -> Response:
        """Answer one request, streamed if it asks for that."""
        try:
            body = without_kv_params(parse_body(await request.body()))
        except MalformedBody as error:
            return Response(str(error), 400)
        path = request.url.path
        wanted = encoded(body) if decodes_alone(path, body) else await self._prefilled(path, body)
        send = self._streamed if wants_stream(body) else self._decoded
        for _ in range(ATTEMPTS - 1):
            try:
                return await send(path, wanted)
            except FAILURES:
                await asyncio.sleep(PAUSE_SECONDS)
        return await send(path, wanted)

    async def _prefilled(self, path: str, body: dict[str, Any]) -> bytes:
        """Return the body for the decode engine: with a ticket, if a prefill engine computed the prompt."""
        try:
            status, answer = await self._prefill.answer.remote(path, prefill_body(body))
        except FAILURES:  # the decode engine computes the prompt
            return encoded(body)
        params = kv_params_of(answer) if status == OK else None
        return decode_body(body, params) if params else encoded(body)

    async def _decoded(self, path: str, body: bytes) -> Response:
        """Return the whole answer of a decode engine."""
        status, answer = await self._decode.answer.remote(path, body)
        return Response(answer, status, media_type="application/json")

    async def _streamed(self, path: str, body: bytes) -> Response:
        """Return the answer of a decode engine as a stream, once its first piece has arrived."""
        pieces = aiter(self._decode.options(stream=True).stream.remote(path, body))
        status, first = await anext(pieces)

        async def rest() -> AsyncIterator[bytes]:
            yield first
            async for _, piece in pieces:
                yield piece

        return StreamingResponse(rest(), status, media_type="text/event-stream")


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application for ``serve run``.

    Args:
        args: ``model``; numbers of replicas ``prefill`` and ``decode`` (default 1); ``arguments`` of vLLM's
            API server; ``settings`` of the connector; ``options`` of an engine's Ray actor, such as
            ``{"num_gpus": 1}`` (default one CPU).
    """
    handles = []
    for role in ("prefill", "decode"):
        deployment = serve.deployment(
            EngineReplica,
            name=role,
            num_replicas=int(args.get(role, 1)),
            ray_actor_options=args.get("options", {"num_cpus": 1}),
            max_ongoing_requests=64,
            **HEALTH,
        )
        arguments, settings = tuple(args.get("arguments", ())), args.get("settings")
        handles.append(deployment.bind(role, args["model"], arguments, settings))
    return serve.deployment(Ingress, name="ingress", ray_actor_options={"num_cpus": 0}).bind(*handles)
