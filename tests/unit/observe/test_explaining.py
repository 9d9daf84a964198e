"""An engine that remembers its requests, and one whose setting disables that."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.connector.events import Arrived, EventStream
from kvferry.observe.trace_server import Question, RequestExplainer
from kvferry.tools.explain.client import ask_engines
from kvferry.tools.explain.timeline import render, render_list


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvferry-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder) / "kvferry"


ENGINE = {"engine_id": "e", "model": "tiny", "role": "prefill"}


def test_events_are_served_until_the_explainer_is_closed(directory: Path) -> None:
    events = EventStream()
    explaining = RequestExplainer(events, 2, **ENGINE)
    explaining.start()
    for name in "abc":
        events.emit(Arrived(name, 0.0, tokens=10, sources=()))
    answers = ask_engines(Question())
    assert [one.trace.request_id for one in answers.traces] == ["c", "b"]
    (engine,) = answers.engines
    assert (engine.role, engine.model, engine.most, engine.remembered) == ("prefill", "tiny", 2, 2)
    explaining.close()
    explaining.close()
    assert not ask_engines(Question()).engines


def test_connectors_of_one_engine_are_distinguished_by_name(directory: Path) -> None:
    both = []
    for name in ("memory", "disk", ""):
        events = EventStream()
        both.append(RequestExplainer(events, 2, **ENGINE, connector=name))
        both[-1].start()
        events.emit(Arrived("a", 0.0, tokens=10, sources=()))
    told = {one.engine.connector: one for one in ask_engines(Question()).traces}
    headings = {name: render(one).splitlines()[1].split(", process")[0] for name, one in told.items()}
    assert headings == {
        "memory": "  prefill engine, connector memory",
        "disk": "  prefill engine, connector disk",
        "": "  prefill engine",
    }
    assert " ago, prefill engine, connector disk, 10 tokens" in render_list([told["disk"]], time.time())
    for explaining in both:
        explaining.close()


def test_an_engine_that_remembers_nothing_costs_nothing(directory: Path) -> None:
    threads, events = threading.active_count(), EventStream()
    explaining = RequestExplainer(events, 0, **ENGINE)
    explaining.start()
    events.emit(Arrived("a", 0.0, tokens=10, sources=()))
    assert threading.active_count() == threads
    assert not directory.exists()
    explaining.close()
