"""What a demo does around its engines."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from kvferry.tools.serving.demo import pair
from kvferry.tools.serving.demo.report import AnswerVerdict, Screen
from kvferry.tools.serving.processes import StopSignals


def test_a_router_thread_imports_nothing_that_a_signal_may_interrupt(monkeypatch, tmp_path: Path) -> None:
    """To make a client imports what the router needs; a second Ctrl-C may interrupt it in this thread."""
    urls = ["http://127.0.0.1:1"]
    fleet = SimpleNamespace(prefill_urls=urls, decode_urls=urls)
    make, beside = pair._client, []

    def client():
        beside.extend(thread.name for thread in threading.enumerate())
        return make()

    monkeypatch.setattr(pair, "Fleet", lambda *_: nullcontext(fleet))
    monkeypatch.setattr(pair, "_client", client)
    monkeypatch.setattr(pair, "wait_ready", lambda *_: None)
    monkeypatch.setattr(pair, "fleet_specs", lambda *_, **__: ())
    monkeypatch.setattr(pair._Run, "rows", lambda run, count: [SimpleNamespace(verdict=run.url)] * count)
    (url,) = pair.measure(MagicMock(), tmp_path / "log", MagicMock(), MagicMock(), count=1, answer_tokens=1)
    assert url.startswith("http://127.0.0.1:")
    assert beside
    assert "router" not in beside


TOKENS = [1, 4093, 198]


class Engine(http.server.BaseHTTPRequestHandler):
    """An endpoint that gives every prompt the same answer, and keeps the requests."""

    protocol_version = "HTTP/1.1"
    requests: ClassVar[list[dict]] = []

    def do_GET(self) -> None:
        self._send({"data": [{"id": "chat", "max_model_len": 512}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            assert [one["role"] for one in request["messages"]] == ["user"]
            return self._send({"tokens": TOKENS})
        self.requests.append(request)
        choice = {"text": "Paris.", "token_ids": [7], "prompt_token_ids": TOKENS}
        return self._send({"choices": [choice]}, "data: ")

    def _send(self, value: object, prefix: str = "") -> None:
        body = f"{prefix}{json.dumps(value)}\n\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine(monkeypatch) -> Iterator[str]:
    monkeypatch.setattr(Engine, "requests", [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_question_is_asked_by_the_chat_template_and_both_answers_are_shown(engine, tmp_path: Path) -> None:
    out = io.StringIO()
    with pair._client() as client, StopSignals() as signals:
        run = pair._Run(
            client=client,
            url=engine,
            single_url=engine,
            questions=("What is the capital of France?", "And of Spain?"),
            answer_tokens=24,
            log=tmp_path / "transfers.jsonl",
            screen=Screen(Console(file=out), 80),
            signals=signals,
        )
        (row,) = run.rows(1)
    assert (row.prompt_tokens, row.verdict) == (len(TOKENS), AnswerVerdict.YES)
    _, first, second = Engine.requests
    for request in (first, second):
        assert (request["prompt"], request["ignore_eos"], request["max_tokens"]) == (TOKENS, False, 24)
    assert "cache_salt" in second
    assert "cache_salt" not in first
    assert out.getvalue().endswith(
        "\n  1 What is the capital of France?\n    pair   Paris.\n    alone  Paris.\n"
    )
