"""What becomes of requests at engines that accept connections and answer nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.tools.serving.devices import listen, url_of
from kvferry.tools.serving.router.backends import Backend, Engines
from kvferry.tools.serving.router.fleet import Prober
from kvferry.tools.serving.router.settings import RouterSettings
from kvferry.tools.serving.router.upstream import EngineClient, Hop, read_whole
from support.waiting import wait_for

pytestmark = pytest.mark.slow

QUICK = {"probe_seconds": 0.05, "silent_seconds": 0.3}
NEVER = {"probe_seconds": 0.05, "silent_seconds": 3600.0}
TICKS = 6
"""Ticks of the prober after which an engine is silent, with `QUICK`."""


@pytest.fixture
def silent():
    """A URL where connections are accepted, and nothing is ever answered."""
    with listen("127.0.0.1", 0) as sock:
        yield url_of(sock)


@pytest.fixture
def apart():
    """Runs a function in another thread."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit


@contextlib.contextmanager
def frozen(engine):
    engine.frozen = True
    try:
        yield
    finally:
        engine.frozen = False


def test_engine_gets_no_request_before_its_first_good_probe(stage, fake, kv, silent):
    scene = stage([silent, fake(hands_over=kv)], [silent, fake()], **NEVER)
    for _ in range(3):
        assert scene.complete().status_code == 200
    assert [body["kv_transfer_params"] for body in scene.decode[1].bodies] == [kv] * 3
    assert scene.client.get("/v1/models").status_code == 200
    reason = scene.client.get("/health").json()["decode"][0]["reason"]
    assert reason == "it has not answered /health yet"


def test_request_waits_for_the_first_probes_and_is_refused_if_none_succeeds(stage, fake, silent):
    scene = stage([fake()], [silent], **QUICK)
    answer = scene.complete()
    assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "engine_unavailable")


def test_engine_of_the_file_gets_no_request_before_its_first_good_probe(
    stage, fake, kv, silent, tmp_path: Path
):
    file, first = tmp_path / "engines", fake()
    scene = stage([fake(hands_over=kv)], [first], engines_file=file, **NEVER)
    file.write_text(f"prefill {scene.prefill[0].url}\ndecode {first.url}\ndecode {silent}\n")
    wait_for(lambda: len(scene.client.get("/health").json()["decode"]) == 2)
    assert [scene.complete().status_code for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("size", [1, 8 << 20], ids=["sent", "upload"])
def test_request_without_an_answer_moves_when_its_engine_is_silent(stage, fake, kv, role, stream, size):
    engines = {"prefill": [fake(hands_over=kv), fake(hands_over=kv)], "decode": [fake(), fake()]}
    scene = stage(engines["prefill"], engines["decode"], **QUICK)
    first, second = engines[role]
    assert scene.complete().status_code == 200
    first, second = (first, second) if not first.asked else (second, first)
    first.freezes = True
    try:
        answer = scene.complete(prompt="x" * size, stream=stream)
        assert (answer.status_code, b"moved" in answer.content) == (200, True)
    finally:
        first.freezes = first.frozen = False
    assert (first.asked, second.asked) == (1, 2)
    assert first.aborted == 0


def test_forwarded_request_moves_when_its_engine_is_silent(stage, fake):
    scene = stage([fake()], [first := fake(), fake()], **QUICK)
    with frozen(first):
        assert scene.client.get("/v1/models").status_code == 200
    assert first.asked == 1


@pytest.mark.parametrize(
    ("path", "name", "found"),
    [
        ("/v1/completions", None, lambda data: data["error"]["reason"]),
        ("/v1/messages", b"event: error\n", lambda data: data["error"]["type"]),
        ("/v1/responses", b"event: error\n", lambda data: data["code"]),
    ],
)
def test_stream_ends_with_an_error_event_of_its_api_when_its_engine_is_silent(
    stage, fake, kv, path, name, found
):
    scene = stage([fake(hands_over=kv)], [engine := fake(event_seconds=3600.0)], **QUICK)
    with scene.client.stream("POST", path, json={"prompt": "x", "stream": True}) as answer:
        first = next(parts := answer.iter_raw())
        with frozen(engine):
            whole = first + b"".join(parts)
    *_, last = whole.removesuffix(b"\n\n").split(b"\n\n")
    assert last.startswith(name or b"data: ")
    assert found(json.loads(last.split(b"data: ")[1])) in ("engine_failed", "api_error")
    assert b"it answers nothing, not even /health" in last


def test_silent_engine_that_was_removed_ends_its_requests(stage, fake, kv, tmp_path):
    file, first, second = tmp_path / "engines", fake(event_seconds=3600.0), fake()
    scene = stage([fake(hands_over=kv)], [first, second], engines_file=file, **QUICK)
    with scene.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        next(parts := answer.iter_raw())
        file.write_text(f"prefill {scene.prefill[0].url}\ndecode {second.url}\n")
        wait_for(lambda: scene.client.get("/health").json()["draining"])
        with frozen(first):
            assert b"engine_failed" in b"".join(parts)


def long_asked(scene, engine, apart, **body) -> Future:
    """Send a request, and return when its engine would be silent, if it were not for its probes."""
    answer = apart(scene.complete, **body)
    wait_for(lambda: engine.asked)
    before = engine.probes
    wait_for(lambda: engine.probes > before + 3 * TICKS)
    return answer


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_busy_engine_that_answers_probes_keeps_its_requests(stage, fake, kv, apart, role):
    engines = {"prefill": [fake(hands_over=kv), fake()], "decode": [fake(), fake()]}
    scene = stage(engines["prefill"], engines["decode"], **QUICK)
    busy, other = engines[role]
    busy.delay_seconds = 3600.0
    answer = long_asked(scene, busy, apart)
    busy.delay_seconds = 0.0
    assert answer.result().status_code == 200
    assert (other.asked, busy.aborted) == (0, 0)


def test_engine_that_only_refuses_new_connections_keeps_its_requests():
    """So does an API server that is being stopped."""
    taken, answer = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        taken.set()
        await answer.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        writer.close()

    async def ask(client: EngineClient, backend: Backend) -> bytes:
        async with client.opened("POST", backend, "/v1/completions") as opened:
            return (await read_whole(opened)).body

    async def main() -> bytes:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        engines = Engines([], [f"http://127.0.0.1:{port}"])
        (backend,) = engines.known
        settings = RouterSettings(prefill=(), decode=(backend.url,), **QUICK)
        async with EngineClient(settings, Hop()) as client:
            prober = Prober(client, engines, settings)
            asked = asyncio.create_task(ask(client, backend))
            await taken.wait()
            server.close()
            for _ in range(3 * TICKS):
                backend.probed = False
                prober.tick()
                await prober.first_probes()
            assert backend.reason == "the router cannot connect to it: Connection refused"
            answer.set()
            return await asked

    assert asyncio.run(main()) == b"hi"
