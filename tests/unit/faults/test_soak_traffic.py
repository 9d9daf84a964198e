"""Every answer of the soak is judged, and so is what engines hold at rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from faults.soak import TOGETHER, Traffic
from faults.soak_rest import HELD, held_at_rest
from faults.soak_values import Soak
from faults.traffic import Ask

pytestmark = pytest.mark.slow

SHORT = Ask("short", "/v1/completions", {})
STREAM = Ask("stream", "/v1/completions", {"stream": True})
LEAVES = Ask("leaves", "/v1/completions", {"stream": True}, leaves=2)
PAGE = "".join(f"# TYPE {name} gauge\n{name} 0.0\n" for name in HELD)


def complete(*texts: str) -> str:
    """An answer with these choices."""
    return json.dumps({"choices": [{"text": text} for text in texts]})


def streamed(*texts: str) -> str:
    """An answer in parts."""
    return "".join(f"data: {complete(text)}\n\n" for text in texts) + "data: [DONE]\n\n"


@contextmanager
def served(answer: str, status: int = 200, page: str = "") -> Iterator[str]:
    """A server that gives every request the same answer; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send(status, answer)

        def do_GET(self) -> None:
            self._send(200, page)

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def soaked(ask: Ask, expected: list[str], answer: str, status: int = 200) -> Soak:
    """A soak in which the same request is made `TOGETHER` times."""
    soak = Soak([[(ask, expected)]])
    with served(answer, status) as url:
        asyncio.run(Traffic(soak, url, 1).serve(0))
    return soak


@pytest.mark.parametrize(
    ("ask", "answer"),
    [(SHORT, complete("right")), (STREAM, streamed("ri", "ght")), (LEAVES, streamed("r", "i", "ght"))],
)
def test_right_answers_are_counted(ask: Ask, answer: str):
    soak = soaked(ask, ["right"], answer)
    assert len(soak.answers) + soak.left == TOGETHER
    assert bool(soak.left) is (ask is LEAVES)
    assert not soak.wrong
    assert not soak.failed


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (SHORT, complete("wrong")),
        (SHORT, complete("right", "right")),
        (SHORT, complete("right and more")),
        (STREAM, streamed("ri")),
        (LEAVES, streamed("r", "x", "ght")),
    ],
)
def test_wrong_answers_are_counted_as_wrong(ask: Ask, answer: str):
    soak = soaked(ask, ["right"], answer)
    assert len(soak.wrong) == TOGETHER
    assert not soak.answers
    assert not soak.left


@pytest.mark.parametrize(
    ("ask", "answer", "status"),
    [(SHORT, "", 500), (STREAM, 'data: {"error": "it broke"}\n\n', 200)],
)
def test_failed_requests_have_no_answer(ask: Ask, answer: str, status: int):
    soak = soaked(ask, ["right"], answer, status)
    assert len(soak.failed) == TOGETHER
    assert not soak.answers


def rest(page: str) -> list[str]:
    """What an engine with this page of metrics holds."""
    with served(complete("a"), page=page) as url:
        engine: Any = SimpleNamespace(spec=SimpleNamespace(url=url, name="decode-0"))
        return asyncio.run(held_at_rest([engine], "a model", 0.0))


def test_resources_held_after_a_rest_are_named():
    assert rest(PAGE) == []
    page = PAGE.replace("kvferry_leases 0.0", "kvferry_leases 3.0")
    assert rest(page) == ["decode-0 holds kvferry_leases 3"]
    assert "no metric kvferry_late_blocks" in rest(PAGE.replace("kvferry_late", "kvferry_early"))[0]
