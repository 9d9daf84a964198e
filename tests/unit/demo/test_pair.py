"""What a demo does around its engines."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

from kvferry.serving.demo import pair


def test_a_router_thread_imports_nothing_that_a_signal_may_interrupt(monkeypatch, tmp_path: Path) -> None:
    """To make a client imports what the router needs; a second Ctrl-C may interrupt it in this thread."""
    urls = ["http://127.0.0.1:1"]
    fleet = SimpleNamespace(prefill_urls=urls, decode_urls=urls, wait_ready=lambda _: None)
    make, beside = pair._client, []

    def client():
        beside.extend(thread.name for thread in threading.enumerate())
        return make()

    monkeypatch.setattr(pair, "Fleet", lambda *_: nullcontext(fleet))
    monkeypatch.setattr(pair, "_client", client)
    monkeypatch.setattr(pair._Run, "rows", lambda run, count: [run.url] * count)
    (url,) = pair._measured((), tmp_path / "log", MagicMock(), MagicMock(), count=1, answer_tokens=1)
    assert url.startswith("http://127.0.0.1:")
    assert beside
    assert "router" not in beside
