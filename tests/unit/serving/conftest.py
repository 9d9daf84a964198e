"""Engines that speak the OpenAI API from a script, and a router before them, all on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.tools.serving.devices import listen, url_of
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.app import RouterApp
from kvferry.tools.serving.router.settings import RouterSettings
from support.ports import reserved_port
from support.scripted_engines import ENGINE, Script
from support.waiting import wait_for

KV = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_block_ids": [[1, 2]],
    "remote_sealed_grant": "c2VhbGVk",
}
_TICK_SECONDS = 0.01
TOKENS = ["The", " bytes", " are", " moved", "."]


class _Server(uvicorn.Server):
    """A uvicorn server that ends in milliseconds: uvicorn's own looks at `should_exit` ten times a second."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.005)


_servers: list[_Server] = []


def _end_servers() -> None:
    """Tell all servers to end, before any is waited for: each takes a tenth of a second."""
    for server in _servers:
        server.should_exit = True


@contextlib.contextmanager
def running(app: Starlette, port: int = 0) -> Iterator[str]:
    """The application on a socket of its own; yields its URL."""
    server = _Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=0))
    sock = listen("127.0.0.1", port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    _servers.append(server)
    try:
        yield url_of(sock)
    finally:
        server.should_exit = True
        _servers.remove(server)
        thread.join()
        sock.close()


@dataclass
class FakeEngine:
    """An engine that does what its attributes say.

    Attributes:
        status: of completions.
        healthy: whether its /health answers 200.
        frozen: whether it accepts requests and probes, and answers none. A test may end this.
        freezes: whether it becomes frozen when it gets a completion.
        asked, probes: number of completions, also those that it did not read, and of probes.
        hands_over: kv_transfer_params of a whole answer.
        delay_seconds: before it answers. A test may change it, and `event_seconds`, to end a wait.
        dies_of: text in a body of which its core dies: it answers 500, and its /health 503.
        dies_after: number of events after which its connection breaks; None for a stream that ends well.
        event_seconds: between two events.
        chunks: bytes of a stream, instead of the usual events.
        location: of its models, if they are elsewhere.
        raw: bodies of completions; their headers and clients' ports beside.
        aborted: requests whose client left before the end.
        kept: ids of the responses that it has made.
        key: API key without which it tells nothing of a response.
        about: methods and URLs of the requests about responses.
    """

    status: int = 200
    healthy: bool = True
    frozen: bool = False
    freezes: bool = False
    asked: int = 0
    probes: int = 0
    hands_over: Any = None
    delay_seconds: float = 0.0
    dies_of: str = ""
    dies_after: int | None = None
    event_seconds: float = 0.0
    chunks: list[bytes] | None = None
    location: str | None = None
    raw: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    aborted: int = 0
    kept: list[str] = field(default_factory=list)
    key: str = ""
    about: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(raw) for raw in self.raw]

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/messages", self.complete, methods=["POST"]),
            Route("/v1/responses", self.respond, methods=["POST"]),
            Route("/v1/responses/{name}", self.response),
            Route("/v1/responses/{name}/cancel", self.response, methods=["POST"]),
            Route("/v1/chat/completions/batch", self.complete, methods=["POST"]),
            Route("/invocations", self.complete, methods=["POST"]),
            Route("/v1/embeddings", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/tokenize", self.tokenize, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    async def thaw(self) -> None:
        while self.frozen:  # noqa: ASYNC110 - a thread ends it
            await asyncio.sleep(_TICK_SECONDS)

    async def health(self, _: Request) -> Response:
        self.probes += 1
        await self.thaw()
        return Response(status_code=200 if self.healthy else 503)

    async def models(self, _: Request) -> Response:
        self.asked += 1
        await self.thaw()
        if self.location is not None:
            return Response(status_code=307, headers={"location": self.location})
        return JSONResponse({"data": [{"id": "m"}]}, self.status)

    async def tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": [1, 2], "asked": await request.json()})

    async def respond(self, request: Request) -> Response:
        body = await request.json()
        if (previous := body.get("previous_response_id")) is not None and previous not in self.kept:
            return self.lacks(previous)
        if body.get("store", True):
            self.kept.append(body.get("request_id"))
        return await self.complete(request)

    async def response(self, request: Request) -> Response:
        self.about.append(f"{request.method} {request.url.path}?{request.url.query}")
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        if (name := request.path_params["name"]) not in self.kept:
            return self.lacks(name)
        if request.query_params.get("stream"):
            return StreamingResponse(self.events(request), media_type="text/event-stream")
        return JSONResponse({"id": name, "of": self.url})

    def lacks(self, name: str) -> Response:
        return JSONResponse({"error": {"message": f"no {name} at {self.url}"}}, 404)

    async def complete(self, request: Request) -> Response:
        self.asked += 1
        self.frozen |= self.freezes
        await self.thaw()
        self.raw.append(await request.body())
        self.headers.append(dict(request.headers))
        self.ports.append(request.client.port)
        body = json.loads(self.raw[-1])
        if self.dies_of and self.dies_of in str(body):
            self.status, self.healthy = 500, False
        began = time.monotonic()
        left = await request.is_disconnected()
        while not left and time.monotonic() - began < self.delay_seconds:
            await asyncio.sleep(_TICK_SECONDS)
            left = await request.is_disconnected()
        if left:
            self.aborted += 1
            return Response()
        if self.status != 200:
            error = {"message": "no such model", "type": "NotFoundError", "param": None, "code": self.status}
            return JSONResponse({"error": error}, self.status)
        if body.get("stream"):
            return StreamingResponse(self.events(request), media_type="text/event-stream")
        if self.dies_after is not None:
            return StreamingResponse(_broken(), media_type="application/json")
        answer = {"choices": [{"text": "".join(TOKENS)}], "usage": {"prompt_tokens": 7}}
        return JSONResponse({**answer, "kv_transfer_params": self.hands_over})

    async def events(self, request: Request):
        whole = [b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n" for text in TOKENS]
        whole.append(b"data: [DONE]\n\n")
        try:
            for number, event in enumerate(self.chunks or whole):
                if number == self.dies_after:
                    # uvicorn cuts the connection when an application raises in its answer.
                    raise ConnectionResetError
                yield event
                await self.thaw()
                began = time.monotonic()
                await asyncio.sleep(0)
                while time.monotonic() - began < self.event_seconds:  # noqa: ASYNC110 - a thread ends it
                    await asyncio.sleep(_TICK_SECONDS)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise


async def _broken():
    yield b'{"choices": ['
    raise ConnectionResetError


@dataclass
class Scene:
    """A router, the engines behind it, and a client before it."""

    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    client: httpx.Client

    def complete(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return self.client.post(path, json={"model": "m", "prompt": "x", "max_tokens": 5, **body})


@pytest.fixture
def stage() -> Iterator[Callable[..., Scene]]:
    """Sets up a scene from scripted engines, or from URLs where nobody listens."""
    with contextlib.ExitStack() as stack:

        def set_up(prefill: list[Any], decode: list[Any], **settings: Any) -> Scene:
            for engine in (*prefill, *decode):
                if isinstance(engine, FakeEngine) and not engine.url:
                    engine.url = stack.enter_context(running(engine.app()))
            urls = [
                tuple(engine if isinstance(engine, str) else engine.url for engine in engines)
                for engines in (prefill, decode)
            ]
            app = RouterApp(
                RouterSettings(prefill=urls[0], decode=urls[1], **{"probe_seconds": 0.1, **settings})
            )
            url = stack.enter_context(running(app))
            client = stack.enter_context(httpx.Client(base_url=url, timeout=60, trust_env=False))
            stack.callback(_end_servers)
            return Scene(prefill, decode, client)

        yield set_up


@pytest.fixture
def fake() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture
def kv() -> dict[str, Any]:
    return KV


@pytest.fixture
def reserved() -> Iterator[Callable[[], int]]:
    """Returns ports that no other process gets, until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(reserved_port())


@pytest.fixture
def script(tmp_path: Path, reserved: Callable[[], int]) -> Callable[..., Script]:
    """Makes specifications of scripts in the place of engines."""

    def make(name: str = "prefill-0", code: str = ENGINE, role: Role = Role.PREFILL) -> Script:
        return Script(name=name, role=role, model="m", port=reserved(), code=code, folder=str(tmp_path))

    return make


@pytest.fixture
def serve_app() -> Callable[..., Any]:
    return running


@pytest.fixture
def nobody(reserved: Callable[[], int]) -> str:
    """A URL where nobody listens."""
    return f"http://127.0.0.1:{reserved()}"
