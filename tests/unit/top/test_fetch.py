"""HTTP answers of any server: each has a time limit and a size limit, and each fault is one sentence."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import anyio
import httpx
import pytest

from kvferry.common.errors import ProtocolError
from kvferry.tools.doctor import http_engine
from kvferry.tools.fetch import MAX_BYTES, HttpReply, client, fetch
from kvferry.tools.serving.role import Role
from kvferry.tools.top.poller import fetch_address

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Answers every request that way, until the block ends."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                asking, _ = listening.accept()
            except OSError:
                return
            with asking, suppress(OSError):
                asking.recv(1 << 16)
                answer(asking)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(10)


def fetched(url: str, seconds: float = 60.0, max_bytes: int = MAX_BYTES) -> HttpReply:
    async def one() -> HttpReply:
        async with client() as http:
            return await fetch(http, f"{url}/metrics", seconds, max_bytes=max_bytes)

    return anyio.run(one)


def endless(asking: socket.socket) -> None:
    asking.sendall(CHUNKED)
    while True:
        asking.sendall(b"10000\r\n" + b"x" * (1 << 16) + b"\r\n")


ended = threading.Event()
"""Never set: waiting for it lets a client read."""


def slow(asking: socket.socket) -> None:
    asking.sendall(CHUNKED)
    while True:
        asking.sendall(b"1\r\nx\r\n")
        ended.wait(0.02)


def silent(asking: socket.socket) -> None:
    asking.recv(1)


def broken(asking: socket.socket) -> None:
    asking.sendall(HEAD + b"content-length: 9\r\n\r\nhalf")


def test_an_answer_of_any_status_is_read_completely() -> None:
    with server(lambda asking: asking.sendall(b"HTTP/1.1 404 no\r\ncontent-length: 2\r\n\r\n{}")) as url:
        assert fetched(url) == HttpReply(404, b"{}")
    assert not HttpReply(404, b"").fine
    assert (HttpReply(200, b"[1]").json, HttpReply(200, b"\xff").json, HttpReply(200, b'"\xff"').json) == (
        [1],
        None,
        None,
    )


@pytest.mark.parametrize(
    ("answer", "seconds", "words"),
    [
        (endless, 60.0, "/metrics is larger than 1 MiB"),
        (slow, 0.5, "/metrics does not end in 0.5 s"),
        (silent, 0.5, "silent for 0.5 s"),
        (broken, 60.0, "RemoteProtocolError: peer closed connection without sending complete message body"),
        (lambda asking: asking.sendall(b"SSH-2.0-OpenSSH\r\n"), 60.0, "RemoteProtocolError: "),
    ],
    ids=["endless", "slow", "silent", "broken off", "no HTTP"],
)
def test_a_bad_answer_is_refused_in_one_sentence(answer, seconds, words) -> None:
    with server(answer) as url, pytest.raises(ProtocolError) as raised:
        fetched(url, seconds, 1 << 20)
    assert str(raised.value).startswith(words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1", "Connection refused"),
        ("http://engine.invalid", ".*(?i:name).*"),
    ],
)
def test_an_unreachable_address_is_refused_with_the_reason(url, why) -> None:
    with pytest.raises(ProtocolError, match=rf"^cannot connect: {why}$"):
        fetched(url)


class Unreachable(httpx.AsyncBaseTransport):
    """A network in which a name has two addresses: one refuses the connection, one does not answer."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        causes = [OSError(errno.ECONNREFUSED, "Connect call failed"), OSError(errno.ETIMEDOUT, "timed out")]
        error = OSError("All connection attempts failed")
        error.__cause__ = ExceptionGroup("multiple connection attempts failed", causes)
        raise httpx.ConnectError("failed", request=request) from error


def test_the_first_address_of_a_name_gives_the_reason() -> None:
    async def one() -> HttpReply:
        async with httpx.AsyncClient(transport=Unreachable()) as http:
            return await fetch(http, "http://engine/metrics", 60.0)

    with pytest.raises(ProtocolError, match=r"^cannot connect: Connection refused$"):
        anyio.run(one)


def test_an_https_url_of_a_server_without_tls_is_refused_with_the_reason() -> None:
    why = r"^cannot connect: no TLS with it \(WRONG_VERSION_NUMBER\)$"
    with (
        server(lambda asking: asking.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as url,
        pytest.raises(ProtocolError, match=why),
    ):
        fetched(url.replace("http:", "https:"))


def test_doctor_reports_an_answer_that_does_not_end() -> None:
    with server(slow) as url:
        seen = http_engine.ExaminedEngine(url, Role.BOTH)
        http_engine.examine_url(url, 0.5, seen)
    (found,) = seen.findings
    assert found.found.startswith("no answer: /health does not end in 0.5 s")


def test_top_refuses_an_answer_that_does_not_end() -> None:
    async def one(url: str) -> None:
        async with client() as http:
            await fetch_address(http, url)

    with server(endless) as url, pytest.raises(ProtocolError, match=r"^/metrics is larger than 64 MiB$"):
        anyio.run(one, url)
