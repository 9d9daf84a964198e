"""Whether an engine is well, by what is at its address."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading

import aiohttp
import anyio
import pytest

from kvferry.tools.serving.devices import listen, url_of
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.backends import Backend
from kvferry.tools.serving.router.fleet import probe
from support.waiting import wait_for


class Answer:
    """An engine's answer with a body that does not end; counts what is taken of it."""

    def __init__(self, status: int) -> None:
        self.status, self.headers, self.taken = status, (), 0

    async def chunks(self):
        while self.taken < 100:
            self.taken += 1
            yield bytes(1 << 20)


class Client:
    """A client that gets this answer to everything."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    @contextlib.asynccontextmanager
    async def opened(self, *_):
        yield self.answer


class Failing:
    """A client that cannot open a socket."""

    def __init__(self, number: int) -> None:
        self.number = number

    @contextlib.asynccontextmanager
    async def opened(self, *_):
        raise aiohttp.ClientOSError(self.number, os.strerror(self.number))
        yield


@pytest.mark.parametrize(("number", "up"), [(errno.EMFILE, True), (errno.ECONNREFUSED, False)])
def test_engine_is_not_down_because_the_router_has_too_many_open_files(number, up):
    backend = Backend(Role.DECODE, "http://127.0.0.1:8000")
    backend.mark_up()
    anyio.run(probe, Failing(number), backend)
    assert backend.up == up


@pytest.mark.parametrize(("status", "up"), [(200, True), (503, False)])
def test_probe_reads_only_the_status_of_an_answer(status, up):
    answer, backend = Answer(status), Backend(Role.DECODE, "http://127.0.0.1:8000/")
    anyio.run(probe, Client(answer), backend)
    assert (backend.up, answer.taken) == (up, 0)


@contextlib.contextmanager
def answering(answer: bytes):
    """A server that answers every connection with these bytes, and closes it; yields its address."""
    with listen("127.0.0.1", 0) as sock:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = sock.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield url_of(sock).removeprefix("http://")
        sock.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.slow
def test_health_says_in_words_why_an_engine_is_down(stage, fake, nobody):
    with answering(b"") as closing, answering(b"hello\r\n") as greeting:
        urls = [nobody, f"http://{closing}", f"http://{greeting}", f"https://{greeting}", "http://a.invalid"]
        engines = stage(urls, [fake()]).client.get("/health").json()["prefill"]
    assert [engine["reason"] for engine in engines] == [
        "the router cannot connect to it: Connection refused",
        "it closed the connection without an answer",
        "its answer is not HTTP/1.1",
        "the router cannot connect to it over https: wrong version number",
        "its host name cannot be resolved",
    ]


@pytest.mark.slow
def test_health_does_not_wait_for_engines_that_hang(stage, fake):
    with contextlib.ExitStack() as stack:
        silent = [url_of(stack.enter_context(listen("127.0.0.1", 0))) for _ in range(4)]
        scene = stage([fake(), *silent[:2]], [fake(), *silent[2:]], silent_seconds=3600.0)
        health = scene.client.get("/health")
        assert (health.status_code, health.json()["decode"][0]["up"]) == (200, True)


@pytest.mark.slow
def test_idle_engine_that_becomes_unhealthy_is_noticed_without_a_request(stage, fake):
    scene = stage([fake()], [fake(), other := fake()])
    assert all(engine["up"] for engine in scene.client.get("/health").json()["decode"])
    other.healthy = False
    wait_for(lambda: not scene.client.get("/health").json()["decode"][1]["up"])
    assert scene.client.get("/health").json()["status"] == "ok"
    other.healthy = True
    wait_for(lambda: scene.client.get("/health").json()["decode"][1]["up"])
